"""The largest magnitudes that modules returned in the last finite steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import nn

from .. import _C
from ..core.module_kinds import is_dropout, is_linear, is_normalization, is_of_torch
from ..recording.watch import ModelWatch

_MUCH_ROOM = 4  # bits
_Peaks = tuple[float, ...]  # the largest magnitude of each of the last steps


class OutputHistory:
    """The outputs of a model's modules in the last steps, where they were finite.

    Args:
        watch: The model's.
    """

    def __init__(self, watch: ModelWatch) -> None:
        self._room: dict[str, float] = {}
        self._made: dict[str, set[_Peaks]] = {}
        for name, history in _of_outputs(watch):
            abs_max = max(filter(math.isfinite, history.recent), default=0.0)
            bits = math.log2(history.last.limit / abs_max) if abs_max else 0.0
            self._room[name] = min(bits, self._room.get(name, math.inf))
            self._made.setdefault(name, set()).add(tuple(history.recent))

    def __contains__(self, name: str) -> bool:
        """Returns whether a module of this name has returned something finite."""
        return name in self._room

    def has_room_in(self, name: str, module: nn.Module) -> bool:
        """Returns whether a linear module's outputs were far from overflowing."""
        return is_linear(module) and self._room.get(name, 0.0) >= _MUCH_ROOM

    def normalizes(self, name: str, module: nn.Module) -> bool:
        """Returns whether a module's class and outputs are those of a normalization."""
        if not is_normalization(module):
            return False
        if is_of_torch(module):
            return True
        weights = list(module.parameters())
        sizes = [float(weight.detach().abs().max()) for weight in weights]
        width = max((weight.numel() for weight in weights), default=0)
        most = math.sqrt(width) * (1.01 + sum(sizes))
        made = self._made.get(name, set())
        return bool(made) and all(each <= most for recent in made for each in recent)

    def returns(self, end: str, around: str, modules: Mapping[str, nn.Module]) -> bool:
        """Returns whether a module's outputs were those of a normalization within it.

        Behind the normalization there may be a dropout, or a linear layer with room.

        Args:
            end: The name of the normalization.
            around: That of the module around it.
            modules: The model's modules by their names.
        """
        made = self._made.get(around, set())
        known = set(self._made.get(end, ()))
        for name, module in modules.items():
            if name.startswith(f"{around}.") and name in self._made:
                is_drop = is_dropout(module) and self._is_dropped(name, module, end)
                if is_drop or self.has_room_in(name, module):
                    known |= _of_same_steps(made, self._made[name])
        return bool(made) and made <= known

    def _is_dropped(self, name: str, module: nn.Module, end: str) -> bool:
        """Returns whether a dropout may have been given a normalization's outputs."""
        p = getattr(module, "p", 1.0)
        most = 1.01 / (1 - p) if module.training and p < 1 else 1.0
        return any(
            all(b <= most * a for a, b in zip(*pair, strict=True))
            for made in self._made.get(end, ())
            for other in self._made.get(name, ())
            for pair in _aligned(made, other)
        )


def _of_outputs(watch: ModelWatch) -> Iterator[tuple[str, _C.HeadroomHistory]]:
    """Yields the histories of what forwards returned, with the modules' names."""
    for history in watch.recorder.headroom():
        place = history.last.place
        is_output = place.label.role == _C.Role.OUTPUT
        if place.kind == _C.FrameKind.FORWARD and is_output:
            yield watch.name_at(place.module), history


def _of_same_steps(made: set[_Peaks], others: set[_Peaks]) -> set[_Peaks]:
    """Those of `made` that are among `others`, too, but for a last step."""
    return {
        one
        for one in made
        for other in others
        if any(a == b for a, b in _aligned(one, other))
    }


def _aligned(made: _Peaks, other: _Peaks) -> Iterator[tuple[_Peaks, _Peaks]]:
    """Yields the same steps of two histories; the second may have one step more.

    It has if the module was called twice in the last step, and once was finite.
    """
    pairs = [(made, other), (made, other[:-1]), (made[1:], other[:-1])]
    yield from (pair for pair in pairs if pair[0] and len(pair[0]) == len(pair[1]))
