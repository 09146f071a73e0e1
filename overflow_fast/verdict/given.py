"""The origin of bad values that a call was given or has read.

Its inputs come from the batch, the training loop or a caller; weights, buffers and
attributes are kept by modules.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from .. import _C
from ..capture import inputs as batch
from ..capture.watch import ModelWatch
from ..core.ops import scan
from ..torch_internals.module_internals import is_batch_norm
from ..tree import entry_label, label_text, tensors_in
from .calls import (
    Called,
    Calls,
    has_pre_hooks,
    is_layer_of_torch,
    joined,
    name_of,
    never_writes,
)
from .verdict import BATCH, STAND_IN, BadFrame, Origin, caller_of

Bad = Mapping[tuple[int, int], BadFrame]  # by watch and order


def origin_of_inputs(outermost: Called, bad: Bad, calls: Calls) -> Origin:
    """Finds the origin of an outermost call's bad inputs: the batch, or the loop."""
    watch, call = outermost
    frame = bad[id(watch), call.order]
    around = watch.modules.ancestors(call.module)
    unwatched = [i for i in around if not watch.modules.is_selected(i)]
    if call.kind == _C.FrameKind.RECOMPUTED:
        names = [name_of(watch, index) for index in around] or [outermost.name]
        maker = f"code that backward ran again: {joined(names)}"
        return Origin("unclear", "unclear", maker, names)
    is_hooked = has_pre_hooks(watch.module_at(call.module))
    if unwatched or is_hooked or (not call.is_traced and _is_written(frame)):
        names = [name_of(watch, index) for index in unwatched] or [outermost.name]
        caller = caller_of(watch)
        maker = f"{_batch_words(frame)}, {caller}, or {joined(names)}"
        return Origin("unclear", "unclear", maker, [*names, BATCH, caller])
    return _origin_of_given(outermost, frame, frame.bad_inputs, calls)


def _origin_of_given(
    outermost: Called, frame: BadFrame, inputs: Sequence[_C.Entry], calls: Calls
) -> Origin:
    """Makes the origin: the batch if a trainer has noted it as bad, else the loop's."""
    places = [_place_in_loop(frame, entry.label) for entry in inputs]
    if all(places):
        return _blame_batch(places, outermost)
    is_computed = all(entry.is_computed for entry in inputs)
    before = calls.before(outermost, None)
    after = "" if before is None else before.name
    loop = frame.watch.inputs.loop_batches.of(outermost.call.batch)
    if is_computed or (loop is not None and loop.bad_places() == []):
        where = f"between {after} and" if after else "before"
        caller = caller_of(outermost.watch)
        maker = f"{caller}, {where} {outermost.name}"
        return Origin("passed_on", "caller", maker, [caller], after)
    places = [
        place or _place_in_call(frame, entry.label)
        for place, entry in zip(places, inputs, strict=True)
    ]
    origin = _blame_batch_or_loop(places, outermost, after)
    return origin if loop is None else replace(origin, batch_places=[])


def _is_written(frame: BadFrame) -> bool:
    """True if the model may have written to its inputs."""
    if never_writes(frame.watch.module_at(frame.frame.module)):
        return False
    return any(
        entry.version != (_held(frame, entry.label).version or 0)
        for entry in frame.bad_inputs
    )


def _held(frame: BadFrame, label: _C.Label) -> batch.WeakTensor:
    """Returns an input that the training loop gave a root."""
    return _given(frame).find(label_text(label))


def _given(frame: BadFrame) -> batch.Given:
    """Returns all inputs that the training loop gave a root."""
    given = (
        None if frame.frame.module else frame.watch.inputs.given.get(frame.frame.batch)
    )
    return given or batch.Given()


def _blame_batch(places: list[str], outermost: Called) -> Origin:
    maker = f"the batch, as {outermost.name} received it: {', '.join(places)}"
    return Origin("given", "batch", maker, [BATCH], batch_places=places)


def _blame_batch_or_loop(places: list[str], outermost: Called, after: str) -> Origin:
    """Makes the origin of a loop's input: the batch, or computed from anything."""
    caller = caller_of(outermost.watch)
    maker = f"the batch or from {caller}"
    maker += f" after {after}" if after else ""
    maker += f", as {outermost.name} received it" if outermost.call.module else ""
    maker += f": {', '.join(places)}"
    candidates: list[str] = [BATCH, caller]
    return Origin("given", "unclear", maker, candidates, after, batch_places=places)


def _batch_words(frame: BadFrame) -> str:
    """Names the batch, with the labels of the bad tensors in it."""
    labels = [entry_label(entry.place) for entry in frame.bad_inputs]
    return f"the batch ({', '.join(labels)})"


def _place_in_loop(frame: BadFrame, label: _C.Label) -> str:
    """Returns the place of an outermost call's input in the trainer's batch, or ""."""
    loop = frame.watch.inputs.loop_batches.of(frame.frame.batch)
    if loop is None:
        return ""
    is_batch_first = batch.is_batch_first(frame.watch.model)
    return loop.place_of(_held(frame, label).tensor(), is_batch_first)


def _place_in_call(frame: BadFrame, label: _C.Label) -> str:
    """Returns the place of an outermost call's input in the call."""
    are_samples = batch.is_batch_first(frame.watch.model) and batch.share_first(
        [held.tensor() for held in _given(frame).tensors.values()]
    )
    tensor = _held(frame, label).unchanged()
    return f"`{label_text(label)}`{batch.samples(tensor, are_samples)}"


def origin_of_unsearched(
    called: Called, frame: BadFrame | None, name: str, calls: Calls
) -> Origin | None:
    """Makes the origin where a call's input that was not searched may be bad."""
    if is_layer_of_torch(called.watch.module_at(called.call.module)):
        return None
    around = calls.chain(called)[1:]
    outermost = around[-1] if around else called
    given = None
    if not outermost.call.module:
        given = outermost.watch.inputs.given.get(outermost.call.batch)
    labels = [] if given is None else given.unseen
    is_known = bool(given) and not around
    own = [] if frame is None else _unseen_inputs(frame, is_known)
    if not labels and not own:
        return None
    caller = caller_of(called.watch)
    outside = [BATCH, caller] if labels or not given else []
    hidden = [
        each.name
        for each in calls.within(outermost)
        if each.call.has_unseen and each.call.order < called.call.order
        if called not in calls.chain(each)
    ]
    givers = [each.name for each in around]
    candidates = list(dict.fromkeys([name, *givers, *hidden, *outside]))
    where = ", ".join(labels or own)
    of = outermost.name if labels else name
    maker = f"{joined(candidates)}; {where} of {of} was not searched"
    return Origin("unclear", "unclear", maker, candidates)


def _unseen_inputs(frame: BadFrame, is_known: bool) -> list[str]:
    """Lists the inputs of a call that were not searched, where they may be the data.

    Tensors that are not scanned may be; objects only where there is no other input
    and their type is not known.
    """
    inputs = [each for each in frame.entries if each.role == _C.Role.INPUT]
    odd = _select_kind(inputs, _C.EntryKind.NOT_SCANNED)
    if not (odd or is_known or _select_kind(inputs, _C.EntryKind.TENSOR)):
        odd = _select_kind(inputs, _C.EntryKind.NOT_TENSOR)
    return [label_text(entry.label) for entry in odd]


def _select_kind(entries: Sequence[_C.Entry], kind: _C.EntryKind) -> list[_C.Entry]:
    return [entry for entry in entries if entry.kind == kind]


def origin_of_minus_infs(
    called: Called, frame: BadFrame, name: str, bad: Bad, calls: Calls
) -> Origin | None:
    """Makes the origin where a call's inputs hold -inf that may be no mask."""
    inputs = _minus_inf_inputs(frame)
    if not inputs:
        return None
    around = calls.chain(called)[1:]
    outermost = around[-1] if around else called
    root = bad.get((id(outermost.watch), outermost.call.order))
    module = called.watch.module_at(called.call.module)
    if not around and isinstance(module, nn.Linear) and not has_pre_hooks(module):
        # No output can be finite then.
        return _origin_of_given(called, frame, inputs, calls)
    is_given = any(_is_mask(frame, entry.label) is False for entry in inputs)
    givers = [each.name for each in around] if is_given else []
    places = []
    if root is not None:
        labels = [entry.label for entry in _minus_inf_inputs(root)]
        labels = [label for label in labels if _is_mask(root, label) is not True]
        places = [
            _place_in_loop(root, label) or _place_in_call(root, label)
            for label in labels
        ]
    if not places and not givers:
        return None
    caller = caller_of(called.watch)
    outside = [BATCH, caller] if places or root is None else []
    candidates = list(dict.fromkeys([name, *givers, *outside]))
    maker = f"{name}, or {joined(candidates[1:])}, which passed on -inf"
    maker += f" in {', '.join(places)}" if places else ""
    return Origin("unclear", "unclear", maker, candidates, batch_places=places)


def _minus_inf_inputs(frame: BadFrame) -> list[_C.Entry]:
    return [
        entry
        for entry in frame.entries
        if entry.nonfinite_kinds == _C.NEGATIVE_INF and not entry.is_bad
        if entry.role == _C.Role.INPUT
    ]


def _is_mask(frame: BadFrame, label: _C.Label) -> bool | None:
    """True if an input that holds -inf is an additive mask; None if it may be.

    A mask holds 0 besides, and comes with something to mask.
    """
    is_known = batch.is_mask(_held(frame, label).unchanged())
    others, lowest = 0, None
    for entry in frame.entries:
        if entry.stat is not None and entry.label == label:
            lowest = entry.stat.abs_min
        elif entry.stat is not None:
            others += entry.role == _C.Role.INPUT
    if is_known is not None:
        return is_known and bool(others)
    if not others or lowest not in (0, math.inf):
        return False
    return None


# Remarks on a bad call: the batch, fill values, negative variances.


# Masks are filled with the lowest finite number, or with nearly that.
_NEAR_MAX = 0.999  # finds -3.4e38, not values that only come near


def remarks_on(first: BadFrame) -> list[str]:
    """Writes what else was seen at the first bad call, in sentences.

    Incurs a CPU-GPU sync for each running variance on a device.
    """
    return [*_sentinels(first), *_negative_variances(first)]


def batch_remarks(first: BadFrame) -> list[str]:
    """Writes where the batch that a trainer has noted is non-finite, in sentences.

    Incurs a CPU-GPU sync for each tensor of the batch.
    """
    noted = first.watch.inputs.loop_batches.of(first.frame.batch)
    is_batch_first = batch.is_batch_first(first.watch.model)
    places = None if noted is None else noted.bad_places(is_batch_first)
    return [f"The batch is non-finite: {', '.join(places)}."] if places else []


def _sentinels(first: BadFrame) -> list[str]:
    """Lists finite inputs that reach the end of their dtype, as finfo.min does."""
    sentences = []
    for entry in first.entries:
        stat, dtype = entry.stat, entry.dtype
        if stat is None or entry.role != _C.Role.INPUT:
            continue
        limit, abs_max = _limit(dtype), stat.abs_max
        num_bad = stat.num_nan + stat.num_inf
        if abs_max is None or limit is None or num_bad or abs_max < _NEAR_MAX * limit:
            continue
        label = entry_label(entry.place)
        sentences.append(
            f"`{label}` holds a magnitude of {abs_max:.3g}, at the end of {dtype}: a "
            "fill value such as finfo.min overflows when something is added to it."
        )
    return sentences


def _limit(dtype: str) -> float | None:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        return None
    return float(torch.finfo(found).max)


def _negative_variances(first: BadFrame) -> list[str]:
    module = first.watch.module_at(first.frame.module)
    variance = getattr(module, "running_var", None)
    if not batch.is_plain(variance):
        return []
    count = int((variance < 0).sum())
    name = f"{first.watch.name_at(first.frame.module)}.running_var".lstrip(".")
    return [f"{count} of {variance.numel()} values of {name} are negative."] * bool(
        count
    )


# Non-finite weights, buffers and attributes of modules, which code may have read.


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
    return replace(
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
    return batch.is_plain(tensor) and bool((tensor == torch.inf).any())
