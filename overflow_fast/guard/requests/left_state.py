"""The state that bad requests leave non-finite for those that come after them.

That is caches that a forward is given and returns, and the buffers of the models.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence

import torch

from ...base.modules import module_of_parameter, named_buffers, named_parameters
from ...base.tensors import widened
from ...base.tree import Path, path_text, tensors
from ...scanner.ops import are_nonfinite
from ..watching.inputs import is_plain
from ..watching.watch import ModelWatch
from .held_call import HeldCall
from .rows import is_nan_or_inf

_log = logging.getLogger("overflow_fast")
_FEW = 4  # names in a line; chosen
_CAST = (
    "\nFor a value beyond 65504 float16 has inf. Kept in float32 before the cast it "
    "stays: overflow_fast.keep_in_fp32({}, {}), then half()."
)


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
        """Notes the buffers that are bad before the first forward.

        Logs a line for each model with weights or buffers that hold a nan or an inf,
        with which it may compute finite outputs that are wrong. Incurs a CPU-GPU sync.
        """
        for watch in self._watches:
            if watch.model is None:
                continue
            buffers = named_buffers(watch.model)
            named = dict([*buffers, *named_parameters(watch.model)])
            plain = [each for each in named.items() if is_plain(each[1])]
            are_bad = are_nonfinite(tensor for _, tensor in plain)
            bad = dict(itertools.compress(plain, are_bad))
            of_buffers = bad.keys() & dict(buffers).keys()
            self.known |= {f"{watch.prefix}{name}": "" for name in of_buffers}
            _warn_of(watch.prefix, bad)

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


def _warn_of(prefix: str, bad: Mapping[str, torch.Tensor]) -> None:
    """Logs which of a model's tensors hold more than the -inf of a mask.

    Args:
        prefix: What the model's names begin with.
        bad: Its non-finite tensors, by name.
    """
    counts = {n: is_nan_or_inf(widened(t.detach())).sum() for n, t in bad.items()}
    found = {name: int(count) for name, count in counts.items() if count}
    texts = [
        f"{prefix}{name} ({count} of {bad[name].numel()} values)"
        for name, count in found.items()
    ]
    if not texts:
        return
    text = ", ".join(texts[:_FEW]) + " and others" * (len(texts) > _FEW)
    owners = dict.fromkeys(
        module_of_parameter(name) for name in found if bad[name].dtype == torch.float16
    )
    if owners:
        model = prefix.rstrip(".") or "model"
        text += _CAST.format(model, list(owners)[:_FEW])
    _log.warning("Before the first request these hold nan or inf: %s", text)


def _written_to(call: HeldCall) -> dict[str, torch.Tensor]:
    """Finds what a forward was given and has written to, and caches in its output."""
    # No version tells of an inference tensor if it was written to. Of those below the
    # arguments caches are made; one that is an argument itself is rather data.
    given = [
        (_label(path), tensor)
        for path, tensor in tensors((call.args, call.kwargs))
        if len(path) > 2 or not tensor.is_inference()
    ]
    written = set(map(id, call.written([tensor for _, tensor in given])))
    found = {name: each for name, each in given if id(each) in written}
    known = {id(tensor) for _, tensor in tensors((call.args, call.kwargs))}
    for path, tensor in tensors(call.output):
        if len(path) > 2 and id(tensor) not in known:
            found[f"output{path_text(path)}"] = tensor
    return found


def _label(path: Path) -> str:
    """The place of an argument's tensor: `past_key_values.layers[0].keys`."""
    is_keyword = path[0].value == 1
    name = str(path[1].value) if is_keyword else f"input[{path[1].value}]"
    return f"{name}{path_text(path[2:])}"
