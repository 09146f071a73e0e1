"""The origin of bad inputs: the batch, the training loop or a caller."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from .. import _C
from ..capture import inputs as batch
from ..capture.labels import entry_label, label_text
from .calls import (
    Called,
    Calls,
    has_pre_hooks,
    is_layer_of_torch,
    joined,
    name_of,
    never_writes,
)
from .verdict import BATCH, LOOP, BadFrame, Origin

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
        maker = f"{_batch_words(frame)}, the training loop, or {joined(names)}"
        return Origin("unclear", "unclear", maker, [*names, BATCH, LOOP])
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
        maker = f"the training loop, {where} {outermost.name}"
        return Origin("passed_on", "caller", maker, [LOOP], after)
    places = [_place(frame, entry.label) for entry in inputs]
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
    maker = "the batch or from the training loop"
    maker += f" after {after}" if after else ""
    maker += f", as {outermost.name} received it" if outermost.call.module else ""
    maker += f": {', '.join(places)}"
    candidates: list[str] = [BATCH, LOOP]
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


def _place(frame: BadFrame, label: _C.Label) -> str:
    if place := _place_in_loop(frame, label):
        return place
    are_samples = batch.is_batch_first(frame.watch.model) and batch.share_first(
        held.tensor() for held in _given(frame).tensors.values()
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
    outside = [BATCH, LOOP] if labels or not given else []
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
        places = [_place(root, label) for label in labels]
    if not places and not givers:
        return None
    outside = [BATCH, LOOP] if places or root is None else []
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
