"""The state that bad requests leave non-finite for those that come after them.

That is caches that a forward is given and returns, and the buffers of the models.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from ...base.modules import named_buffers
from ...base.tensors import widened
from ...base.tree import Path, path_text, tensors
from ...scanner.ops import are_nonfinite
from ..watching.inputs import is_plain
from ..watching.watch import ModelWatch
from .held_call import HeldCall
from .rows import is_nan_or_inf


class LeftState:
    """The state that is non-finite since a request of a guard, or since its beginning.

    Args:
        watches: The watched models.

    Attributes:
        known: The subject of the request that has left it, by name; "" for none.
    """

    def __init__(self, watches: Sequence[ModelWatch]) -> None:
        self._watches = watches
        self.known: dict[str, str] = {}

    def look(self) -> None:
        """Notes the buffers that are bad before the first forward."""
        named = self._buffers()
        bad = itertools.compress(named, are_nonfinite(named.values()))
        self.known |= dict.fromkeys(bad, "")

    def note(self, left: Mapping[str, list[int] | None], subject: str) -> None:
        """Notes what a request has left."""
        for name in left:
            self.known.setdefault(name, subject)

    def by(self, call: HeldCall | None) -> dict[str, list[int] | None]:
        """Finds what a forward has left non-finite, and none before it: rows by name.

        Incurs a CPU-GPU sync for each tensor on a device that is looked at.

        Args:
            call: The forward, of which nothing was run again yet.

        Returns:
            The rows; None for all, and where it has none.
        """
        named = {} if call is None else {**_written_to(call), **self._written(call)}
        new = [e for e in named.items() if is_plain(e[1]) and e[0] not in self.known]
        are_bad = are_nonfinite(tensor for _, tensor in new)
        found: dict[str, list[int] | None] = {}
        for name, tensor in itertools.compress(new, are_bad):
            bad = is_nan_or_inf(widened(tensor))
            if bool(bad.any()):
                rows = bad.reshape(len(tensor), -1).any(1) if tensor.dim() else bad
                is_whole = not tensor.dim() or bool(rows.all())
                found[name] = None if is_whole else rows.nonzero().flatten().tolist()
        return found

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {
            f"{watch.prefix}{name}": each
            for watch in self._watches
            if watch.model is not None
            for name, each in named_buffers(watch.model)
        }

    def _written(self, call: HeldCall) -> dict[str, torch.Tensor]:
        """The buffers that were written to since a forward began."""
        own = set(map(id, call.state.written_buffers()))
        if not own:
            return {}
        return {name: each for name, each in self._buffers().items() if id(each) in own}


def _written_to(call: HeldCall) -> dict[str, torch.Tensor]:
    """Finds what a forward was given and has written to, and caches in its output."""
    given = [
        (_label(path), tensor) for path, tensor in tensors((call.args, call.kwargs))
    ]
    written = set(map(id, call.written([tensor for _, tensor in given])))
    found = {name: each for name, each in given if id(each) in written}
    known = {id(tensor) for _, tensor in given}
    for path, tensor in tensors(call.output):
        if len(path) > 2 and id(tensor) not in known:
            found[f"output{path_text(path)}"] = tensor
    return found


def _label(path: Path) -> str:
    """The place of an argument's tensor: `past_key_values.layers[0].keys`."""
    is_keyword = path[0].value == 1
    name = str(path[1].value) if is_keyword else f"input[{path[1].value}]"
    return f"{name}{path_text(path[2:])}"
