"""Non-finite weights, buffers and attributes of modules, which code may have read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from ... import _C
from ...base.module_kinds import is_layer_of_torch
from ...base.modules import module_of_parameter
from ...base.tree import tensors_in
from ...scanner.ops import are_nonfinite, scan
from ...torch_internals.module_internals import is_batch_norm
from ..watching.inputs import is_plain
from ..watching.watch import ModelWatch
from .bad_frames import BadFrame
from .call_order import Calls
from .verdict import Origin

Bad = Mapping[tuple[int, int], BadFrame]  # by watch and order
_Owners = Mapping[str, tuple[ModelWatch, int]]


class KeptValue(NamedTuple):
    """A non-finite value that a module keeps from call to call.

    Attributes:
        kind: "weight", "buffer" or "attribute".
        name: Its name.
        words: What is known of it.
        was_bad: It was never seen finite.
    """

    kind: str
    name: str
    words: str
    was_bad: bool = False

    @property
    def candidate(self) -> str:
        """Its name among `Origin.candidates`: of an attribute, the module's."""
        if self.kind != "attribute":
            return self.name
        return module_of_parameter(self.name) or "the model"


def nonfinite_state(
    origin: Origin, first: BadFrame, bad: Bad, calls: Calls
) -> list[KeptValue]:
    """Lists the non-finite values that the code which made the first may have read.

    A weight that no call can have written is the first bad value itself. Others are
    those without a gradient in custom modules, which may keep statistics in them, and
    those that the step has not checked; buffers; attributes. Leaves out what only a
    later call can have made bad. Incurs CPU-GPU syncs for values on a device.

    Args:
        origin: The origin, as far as calls show.
        first: The frame with the first bad value.
        bad: All bad frames.
        calls: The calls of all watched models.
    """
    owners = {
        watch.name_at(index): (watch, index)
        for watch in calls.watches
        for index in watch.modules.order
    }
    found = [*_weights(bad, calls, owners), *_buffers(bad, calls)]
    module = first.watch.module_at(first.frame.module)
    if origin.source == "module" and is_layer_of_torch(module):
        own = first.watch.name_at(first.frame.module)  # all that it reads
        return [kept for kept in found if module_of_parameter(kept.name) == own]
    found += _attributes(owners)
    return [
        kept
        for kept in found
        if (owner := owners.get(module_of_parameter(kept.name))) is None
        or _may_be_read(kept, *owner, origin, first, calls)
    ]


def _may_be_read(
    kept: KeptValue,
    watch: ModelWatch,
    index: int,
    origin: Origin,
    first: BadFrame,
    calls: Calls,
) -> bool:
    """True if the value may have been bad when the first one was made.

    Where it was finite, and its owner only called later, that call has made it bad. A
    call that is given the first bad value comes later, too.
    """
    module = watch.module_at(index)
    if kept.kind == "buffer" and is_batch_norm(module) and module and module.training:
        return False  # it only writes to them
    if kept.was_bad or (watch.name_at(index) or "the model") in origin.candidates:
        return True
    began = first.frame.order + (not first.bad_inputs)
    is_called = calls.last_of(watch, index, _C.Recorder.num_frames() + 1) is not None
    return not is_called or calls.last_of(watch, index, began) is not None


def checks_weights(watch: ModelWatch, calls: Calls) -> bool:
    """True if the weights of selected modules were checked in the step."""
    return watch.wanted.weights and calls.has_any(watch)


def _weights(bad: Bad, calls: Calls, owners: _Owners) -> Iterator[KeptValue]:
    """Yields the weights that were bad in a call, or that are, and were not checked."""
    seen, end = set[str](), _C.Recorder.num_frames() + 1
    for frame in bad.values():
        for entry in frame.bad_weights:
            name = entry.label.name
            owner = owners.get(module_of_parameter(name))
            if frame.is_of_call:
                name = f"{frame.watch.name_at(frame.frame.module)}.{name}".lstrip(".")
            elif owner is not None and calls.last_of(*owner, end) is not None:
                continue  # scanned after its call, which has seen it finite
            seen.add(name)
            was_bad = frame.watch.recorder.last_peak(entry.place) is None
            how = "which was non-finite too"
            yield KeptValue("weight", name, f"the weight {name}, {how}", was_bad)
    for name in _unchecked(calls, owners):
        if name not in seen:
            how = "which is non-finite now and was not checked"
            yield KeptValue("weight", name, f"the weight {name}, {how}")


def _unchecked(calls: Calls, owners: _Owners) -> Iterator[str]:
    """Yields the names of the bad weights that the step has not checked."""
    for watch in calls.watches:
        if (model := watch.model) is None:
            continue
        is_checked = checks_weights(watch, calls)
        asked = {
            name: weight
            for name, weight in zip(*watch.tensors.parameters(model, True), strict=True)
            if not is_checked
            or (owner := owners.get(module_of_parameter(name))) is None
            or not watch.modules.is_selected(owner[1])
        }
        yield from itertools.compress(asked, are_nonfinite(asked.values()))


def _buffers(bad: Bad, calls: Calls) -> Iterator[KeptValue]:
    """Yields the bad buffers; not those that hold nothing worse than -inf: masks."""
    found: dict[str, bool] = {}
    for watch in calls.watches:
        if (model := watch.model) is not None:
            names, buffers = watch.tensors.buffers(model, all_modules=True)
            worst = _worst(buffers)
            found.update((n, True) for n, w in zip(names, worst, strict=True) if w)
    for frame in bad.values():
        if frame.frame.kind == _C.FrameKind.BUFFERS:
            for entry in frame.bad_entries:
                was_finite = frame.watch.recorder.last_peak(entry.place)
                found[entry.label.name] = was_finite is None
    for name, was_bad in found.items():
        words = f"the buffer {name}, which is non-finite too"
        yield KeptValue("buffer", name, words, was_bad)


_NUMBERS = (bool, int, float, str)  # most attributes


def _attributes(owners: _Owners) -> Iterator[KeptValue]:
    """Yields the attributes that hold a nan or an inf in what is no buffer."""
    for owner, (watch, index) in owners.items():
        module = watch.module_at(index)
        for key, value in () if module is None else vars(module).items():
            if key.startswith("_") or value is None or isinstance(value, _NUMBERS):
                continue
            worst = max(_worst(tensors_in(value)), default="")
            if worst:
                name = f"{owner}.{key}".lstrip(".")
                words = f"a value kept in {name}, which holds {worst}"
                yield KeptValue("attribute", name, words)


def _worst(tensors: list[torch.Tensor]) -> list[str]:
    """Returns for each tensor "nan" or "inf" if it holds one; "" if at worst -inf."""
    if not tensors:
        return []
    return [
        "nan" if stat.has_nan else "inf" if stat.has_inf and _has_inf(tensor) else ""
        for tensor, stat in zip(tensors, scan(tensors), strict=True)
    ]


def _has_inf(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and bool((tensor == torch.inf).any())
