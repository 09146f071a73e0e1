"""Non-finite weights, buffers and attributes of modules, which code may have read."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from .. import _C
from ..capture.inputs import is_plain
from ..capture.watch import ModelWatch
from ..core.ops import scan
from ..torch_internals.module_internals import is_batch_norm
from ..tree import tensors_in
from .calls import Calls, is_layer_of_torch, joined
from .outer_inputs import Bad
from .verdict import STAND_IN, BadFrame, Origin

_Owner = tuple[ModelWatch, int]
Candidate = tuple[str, str]  # its name among `Verdict.candidates`, and in words


class _Kept(NamedTuple):
    """A non-finite value that a module keeps from call to call.

    Attributes:
        name: The name of the weight, buffer or attribute.
        candidate: The value as a candidate.
        was_bad: It was never seen finite.
        is_buffer: It is a buffer.
    """

    name: str
    candidate: Candidate
    was_bad: bool = False
    is_buffer: bool = False


def or_by_state(
    origin: Origin,
    first: BadFrame,
    bad: Bad,
    calls: Calls,
    others: Sequence[Candidate] = (),
) -> Origin:
    """Returns an origin, which is unclear if modules keep what can have made it, too.

    A weight that no call can have written is the first bad value itself, and its origin
    known. Others are those without a gradient in custom modules, which may keep
    statistics in them, and those that the step has not checked; buffers; attributes.
    Leaves out what only a later call can have made bad. Incurs CPU-GPU syncs for values
    on a device.

    Args:
        origin: Who can have made it, as far as calls show.
        first: The frame with the first bad value.
        bad: All bad frames.
        calls: The calls of all watched models.
        others: Further candidates.
    """
    state = [] if origin.origin == "given" else _readable(first, origin, bad, calls)
    others = [*(kept.candidate for kept in state), *_stand_ins(origin, calls), *others]
    if not others:
        return origin
    maker, colon, why = origin.maker, "", ""
    if origin.origin == "made":
        maker = f"the code of {maker}"
    if not first.is_of_call:  # what was not checked stands last
        maker, colon, why = maker.partition(": ")
    names = dict.fromkeys([*origin.candidates, *(name for name, _ in others)])
    return dataclasses.replace(
        origin,
        origin="unclear",
        source="unclear",
        maker=f"{maker}, or {joined(words for _, words in others)}{colon}{why}",
        candidates=list(names),
        nonfinite_state=[kept.name for kept in state],
    )


def _stand_ins(origin: Origin, calls: Calls) -> Iterator[Candidate]:
    """Yields tensors that stood in for weights which the step has not checked."""
    if origin.origin != "given" and any(
        watch.inputs.have_stand_ins and not _checks_weights(watch, calls)
        for watch in calls.watches
    ):
        words = f"{STAND_IN} in the place of a weight, which was not checked"
        yield STAND_IN, words


def _checks_weights(watch: ModelWatch, calls: Calls) -> bool:
    """True if the weights of selected modules were checked in the step."""
    return watch.wanted.weights and calls.has_any(watch)


def _readable(first: BadFrame, origin: Origin, bad: Bad, calls: Calls) -> list[_Kept]:
    """Lists the non-finite values that the code which made the first may have read."""
    owners = {
        watch.name_at(index): (watch, index)
        for watch in calls.watches
        for index in watch.modules.order
    }
    found = [*_weights(bad, calls, owners), *_buffers(bad, calls)]
    module = first.watch.module_at(first.frame.module)
    if origin.source == "module" and is_layer_of_torch(module):
        own = first.watch.name_at(first.frame.module)  # all that it reads
        return [kept for kept in found if _owner_of(kept.name) == own]
    found += _attributes(owners)
    makers = origin.candidates
    return [each for each in found if _may_be_read(each, owners, makers, first, calls)]


def _may_be_read(
    kept: _Kept,
    owners: Mapping[str, _Owner],
    makers: Sequence[str],
    first: BadFrame,
    calls: Calls,
) -> bool:
    """True if one of the makers may have read a module's value."""
    name = _owner_of(kept.name)
    owner = owners.get(name)
    if owner is None:
        return True
    if kept.is_buffer and _only_writes(owner):
        return False
    is_own = (name or "the model") in makers
    return is_own or _is_earlier(owner, kept.was_bad, first, calls)


def _is_earlier(owner: _Owner, was_bad: bool, first: BadFrame, calls: Calls) -> bool:
    """True if a module's value may have been bad before the first one was.

    Where it was finite, and its owner only called later, that call has made it bad. A
    call that is given the first bad value comes later, too.
    """
    watch, index = owner
    began = first.frame.order + (not first.bad_inputs)
    before = calls.last_of(watch, index, began)
    after = calls.last_of(watch, index, _C.Recorder.num_frames() + 1)
    return was_bad or before is not None or after is None


def _only_writes(owner: _Owner) -> bool:
    """True if a module only writes to its buffers: statistics, in training."""
    watch, index = owner
    module = watch.module_at(index)
    return module is not None and is_batch_norm(module) and module.training


def _weights(bad: Bad, calls: Calls, owners: Mapping[str, _Owner]) -> Iterator[_Kept]:
    """Yields the weights that were bad in a call, or that are, and were not checked."""
    seen = dict(_weights_in_frames(bad, calls, owners))
    unchecked = set(_unchecked(calls, owners))
    for name in _nonfinite_weights(calls, unchecked | seen.keys()):
        was_bad = seen.pop(name, None)
        how = "which is non-finite too"
        if was_bad is None:
            how = "which is non-finite now and was not checked"
        yield _weight(name, how, bool(was_bad))
    for name, was_bad in seen.items():
        how = "which was non-finite in the call and is finite now: something else "
        yield _weight(name, f"{how}stood in for it, or it changed", was_bad)


def _weight(name: str, how: str, was_bad: bool) -> _Kept:
    return _Kept(name, (name, f"the weight {name}, {how}"), was_bad)


def _weights_in_frames(
    bad: Bad, calls: Calls, owners: Mapping[str, _Owner]
) -> Iterator[tuple[str, bool]]:
    """Yields the bad weights of the step's calls, and whether each was never finite."""
    for frame in bad.values():
        for entry in frame.bad_weights:
            name = entry.label.name
            if frame.is_of_call:
                owner = frame.watch.name_at(frame.frame.module)
                name = f"{owner}.{name}".lstrip(".")
            elif _is_called(owners.get(_owner_of(name)), calls):
                continue  # scanned after its call, which has seen it finite
            yield name, frame.watch.recorder.last_peak(entry.place) is None


def _unchecked(calls: Calls, owners: Mapping[str, _Owner]) -> Iterator[str]:
    """Yields the names of the weights that the step has not checked."""
    for watch in calls.watches:
        model = watch.model
        is_checked = _checks_weights(watch, calls)
        for name in [] if model is None else watch.tensors.parameters(model, True)[0]:
            owner = owners.get(_owner_of(name))
            is_selected = owner is not None and watch.modules.is_selected(owner[1])
            if not (is_checked and is_selected):
                yield name


def _nonfinite_weights(calls: Calls, among: Container[str]) -> Iterator[str]:
    for watch in calls.watches:
        model = watch.model
        named = ([], []) if model is None else watch.tensors.parameters(model, True)
        asked = [pair for pair in zip(*named, strict=True) if pair[0] in among]
        stats = scan([weight for _, weight in asked])
        for (name, _), stat in zip(asked, stats, strict=True):
            if stat.has_nan or stat.has_inf:
                yield name


def _owner_of(name: str) -> str:
    return name.rpartition(".")[0]


def _is_called(owner: _Owner | None, calls: Calls) -> bool:
    last = _C.Recorder.num_frames() + 1
    return owner is not None and calls.last_of(*owner, last) is not None


def _buffers(bad: Bad, calls: Calls) -> Iterator[_Kept]:
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
        yield _Kept(name, (name, words), was_bad, is_buffer=True)


def _attributes(owners: Mapping[str, _Owner]) -> Iterator[_Kept]:
    """Yields the attributes that hold a nan or an inf in what is no buffer."""
    for owner, (watch, index) in owners.items():
        module = watch.module_at(index)
        for key, value in () if module is None else vars(module).items():
            tensors = [] if key.startswith("_") else tensors_in(value)
            worst = set(_worst(tensors))
            for what in ("nan", "inf"):
                if what in worst:
                    name = f"{owner}.{key}".lstrip(".")
                    words = f"a value kept in {name}, which holds {what}"
                    yield _Kept(name, (owner or "the model", words))
                    break


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
