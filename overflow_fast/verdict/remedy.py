"""The search for a module that avoids a float16 overflow in float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from .. import _C
from ..core.module_kinds import (
    has_weights,
    is_dropout,
    is_linear,
    is_small_step,
)
from ..core.names import named_modules
from .half_casts import may_leave_float32
from .output_history import OutputHistory
from .verdict import BadFrame, Verdict

_LONG_HISTORY = 16  # frames: a norm that runs first in a block is among them


@dataclass(frozen=True)
class Remedy:
    """The arguments of a `keep_in_fp32` that was not tried.

    Attributes:
        names: The qualified names of the modules to run in float32.
        until: Those of the modules up to which values stay in float32; empty if `names`
            ends with a module that makes them small.
        end: The name of the normalization that makes them small.
    """

    names: list[str]
    until: list[str] = field(default_factory=list)
    end: str = ""

    @property
    def code(self) -> str:
        """The call, where `model` is the watched model."""
        until = f", until={self.until}" if self.until else ""
        return f"overflow_fast.keep_in_fp32(model, {self.names}{until})"


def remedy_for(frames: Sequence[BadFrame], verdict: Verdict) -> Remedy | None:
    """Finds the modules to run in float32 where float16 has certainly overflowed.

    A module that only multiplies and adds has a finite float32 result if its inputs are
    finite. The smallest module around it that ends with a normalization then computes
    in one dtype, and returns small values.

    Args:
        frames: The bad frames of a step.
        verdict: The verdict on them.

    Returns:
        The remedy, or None if the overflow is not certain, or no such module is known.
    """
    first = min(frames, key=lambda bad: bad.sequence, default=None)
    model = None if first is None else first.watch.model
    if first is None or model is None or not _is_overflow(first, verdict):
        return None
    return _Search(first, frames, model).remedy()


def _is_overflow(first: BadFrame, verdict: Verdict) -> bool:
    """Returns whether only float16's range can have made the first bad value."""
    entry, module = verdict.first, first.watch.module_at(first.frame.module)
    if entry is None or module is None or first.watch.prefix:
        return False
    is_output = first.frame.kind == _C.FrameKind.FORWARD and entry.kind == "output"
    is_child = first.watch.name_at(first.frame.module) != ""
    is_inf = entry.dtype == "float16" and entry.num_nan == 0
    return (
        (is_output and is_inf and verdict.source == "module")
        and is_child
        and (is_linear(module) or is_dropout(module))
    )


def _bad_outputs(bad: BadFrame) -> list[tuple[int, bool]]:
    """Lists the sizes of bad outputs, and if they hold infs, as no norm returns."""
    infs = _C.POSITIVE_INF | _C.NEGATIVE_INF
    return [
        (entry.numel, bool(entry.nonfinite_kinds & infs))
        for entry in bad.bad_entries()
        if entry.role == _C.Role.OUTPUT
    ]


def _is_origin(bad: BadFrame) -> bool:
    """Returns whether a call with finite inputs and weights has a bad output."""
    return bool(_bad_outputs(bad)) and not bad.has_bad_input and not bad.bad_weights()


class _Search:
    """A search for a normalization behind the first bad call."""

    def __init__(
        self, first: BadFrame, frames: Sequence[BadFrame], model: nn.Module
    ) -> None:
        self._watch = watch = first.watch
        self._name = watch.name_at(first.frame.module)
        self._modules = dict(named_modules(model))
        batch = first.frame.batch
        self._before = {
            watch.name_at(frame.module)
            for frame in watch.frames.before
            if frame.batch == batch and frame.kind == _C.FrameKind.FORWARD
        }
        self._is_history_long = len(watch.frames.before) >= _LONG_HISTORY or any(
            frame.opens_batch for frame in watch.frames.before
        )
        calls = [
            bad
            for bad in sorted(frames, key=lambda bad: bad.sequence)
            if bad.watch is watch and bad.frame.batch == batch
            if bad.frame.kind == _C.FrameKind.FORWARD
        ]
        self._after = [watch.name_at(bad.frame.module) for bad in calls[1:]]
        self._returned = {
            watch.name_at(bad.frame.module): _bad_outputs(bad) for bad in calls
        }
        self._history = OutputHistory(watch)
        self._origins = [
            name
            for bad in calls
            if _is_origin(bad) and (name := watch.name_at(bad.frame.module))
            if not any(each.startswith(f"{name}.") for each in self._returned)
        ]

    def remedy(self) -> Remedy | None:
        """Finds the smallest part of the model that can run in float32 by itself."""
        end = self._end_in_sequence()
        if end and self._is_whole([self._name, end]):
            return Remedy([self._name], [end], end)
        around = self._name.rpartition(".")[0]
        while around:
            end = self._end_of(around)
            if end and self._is_whole([around]):
                return Remedy([around], [], end)
            around = around.rpartition(".")[0]
        return None

    def _end_in_sequence(self) -> str:
        """Finds the normalization behind it in an `nn.Sequential`."""
        parent = self._name.rpartition(".")[0]
        is_sequence = type(self._modules[parent]) is nn.Sequential
        if not is_sequence or not self._is_called(parent):
            return ""
        children = list(self._children(parent))
        place = [name for name, _ in children].index(self._name)
        for name, module in children[place + 1 :]:
            if self._history.normalizes(name, module):
                return name
            if not is_small_step(module):
                break
        return ""

    def _end_of(self, around: str) -> str:
        """Finds the normalization that ends a module's call, or ""."""
        end = self._last_in(around)
        is_last = (
            end
            and self._runs_last(end, around)
            and self._history.returns(end, around, self._modules)
        )
        return end if is_last else ""

    def _last_in(self, around: str) -> str:
        """Finds the normalization behind which a module has no other weights, or ""."""
        children = [child for child in self._children(around) if has_weights(child[1])]
        if children and self._history.has_room_in(*children[-1]):
            children.pop()
        if not children or not self._is_called(around):
            return ""
        name, module = children[-1]
        return name if self._history.normalizes(name, module) else self._last_in(name)

    def _is_called(self, name: str) -> bool:
        return name in self._history or name in self._after

    def _is_whole(self, names: Sequence[str]) -> bool:
        """Returns whether modules stay in float32, and nothing else needs to.

        Another call that made a bad value of finite ones overflows again. A layer
        elsewhere that shares a weight, as a tied head does, runs in float32, too, and
        its outputs are cast back: they must have been far from overflowing.
        """
        inside = {each for name in names for each in self._modules[name].modules()}
        weights = {id(p) for module in inside for p in module.parameters()}
        large = {id(p) for p in self._modules[self._name].parameters()}
        sharing = {
            name: {id(p) for p in module.parameters(recurse=False)}
            for name, module in self._modules.items()
            if module not in inside and not isinstance(module, nn.Embedding)
        }
        is_shared = any(
            shared & weights
            and (
                shared & large
                or not self._history.has_room_in(name, self._modules[name])
            )
            for name, shared in sharing.items()
        )
        return (
            not is_shared
            and all(self._modules[name] in inside for name in self._origins)
            and not any(may_leave_float32(self._modules[name]) for name in names)
        )

    def _runs_last(self, end: str, around: str) -> bool:
        """Returns whether a normalization may run last, by the calls that were seen."""
        is_known = end in self._after or self._is_history_long
        if end in self._before or not is_known:
            return False
        begin = self._after.index(end) if end in self._after else len(self._after)
        behind = [name for name in self._after[begin:] if name.startswith(f"{around}.")]
        sizes = {size for name in behind for size, _ in self._returned[name]}
        return all(
            size in sizes and not is_inf
            for size, is_inf in self._returned.get(around, [])
        ) and not any(self._computes(name) for name in behind[1:])

    def _computes(self, name: str) -> bool:
        """Returns whether a module with weights of its own may make large values."""
        module = self._modules[name]
        has_own = any(True for _ in module.parameters(recurse=False))
        return has_own and not self._history.has_room_in(name, module)

    def _children(self, name: str) -> Iterator[tuple[str, nn.Module]]:
        for key, child in self._modules[name].named_children():
            yield f"{name}.{key}".lstrip("."), child
