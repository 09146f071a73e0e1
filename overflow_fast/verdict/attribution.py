"""The attribution of a step's bad frames: the first bad entry, and its origin."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from .. import _C
from ..flags import is_label
from ..recording.labels import entry_label, label_text
from ..recording.watch import ModelWatch
from .backward import origin_of_gradient
from .calls import Calls
from .forward import key_of, origin_in_forward
from .hardware import OF_FLAG
from .kept import or_by_state
from .parameters import (
    around_gradients,
    given_weights,
    origin_of_gradients,
    origin_of_state,
)
from .remarks import batch_remarks, remarks_on
from .verdict import (
    BATCH,
    FORWARDS,
    LOSS,
    OF_CALLS,
    BadEntry,
    BadFrame,
    EntryHeadroom,
    Origin,
    Verdict,
    headroom_of,
    kind_of,
)

_log = logging.getLogger("overflow_fast")


def attribute(
    frames: Sequence[BadFrame],
    watches: Sequence[ModelWatch] = (),
    is_check: bool = False,
) -> Verdict:
    """Finds the first bad entry of a step and its origin.

    Incurs a CPU-GPU sync for each tensor on a device that is scanned again, if
    something is bad.

    Args:
        frames: All bad frames of a step, in any order.
        watches: All watched models; those of the frames if none are given.
        is_check: True if an optimizer that the guard does not have may have stepped
            since the frames of calls.

    Returns:
        The verdict; a clean one if there are no frames.
    """
    if not frames:
        return Verdict()
    ordered = sorted(frames, key=lambda bad: bad.sequence[1 if is_check else 0 :])
    first, entry = _first_of(ordered, is_check)
    watches = watches or list(dict.fromkeys(bad.watch for bad in frames))
    origin = _origin_or_why_not(first, entry, ordered, watches)
    dirty, clean = around_gradients(ordered)
    return Verdict(
        batch=first.frame.batch,
        first=_bad_entry(first, entry),
        **vars(origin),
        masks=_tolerated(first, are_masks=True),
        allowed=_tolerated(first, are_masks=False),
        headroom=_headroom_before(first, entry),
        num_bad_frames=len(frames),
        dirty_gradients=dirty,
        clean_gradients=clean,
        is_recomputed=first.frame.is_recomputed,
        reaches_loss=any(map(_is_of_loss, frames)),
    )


def _first_of(ordered: Sequence[BadFrame], is_check: bool) -> tuple[BadFrame, _C.Entry]:
    """Finds the first bad frame and entry: a weight that was bad before, if any.

    Weights are scanned where they are used, so a later module's come behind the
    outputs of an earlier module.
    """
    earliest = ordered[0]
    for bad in ordered:
        weights = given_weights(bad)
        is_of_step = not is_check or (
            bad.frame.kind == _C.FrameKind.FORWARD
            and (bad.watch, bad.frame.batch) == (earliest.watch, earliest.frame.batch)
        )
        if weights and is_of_step:
            return bad, weights[0]
    # A weight that the call may have written stands in front of its inputs.
    return earliest, (earliest.bad_inputs() or earliest.bad_entries())[0]


def _is_of_loss(bad: BadFrame) -> bool:
    """Returns whether a bad entry is a loss, or an output of a model."""
    roles = [entry.role for entry in bad.bad_entries()]
    is_root = bad.frame.module == 0 and bad.is_of_call
    return _C.Role.RECORDED in roles or (is_root and _C.Role.OUTPUT in roles)


def _bad_entry(bad: BadFrame, entry: _C.Entry) -> BadEntry:
    stat = entry.stat
    assert stat is not None
    label = entry_label(entry.place)
    is_of_call = entry.role in OF_CALLS
    fqn = bad.watch.name_at(bad.frame.module)
    if entry.role == _C.Role.WEIGHT and bad.is_of_call:
        label = f"{fqn}.{label}".lstrip(".")
    return BadEntry(
        kind_of(entry.role),
        fqn if is_of_call else label,
        bad.frame.class_name if is_of_call else "",
        label,
        entry.dtype,
        stat.num_nan,
        stat.num_inf,
        entry.numel,
        _signs(entry.nonfinite_kinds),
    )


def _signs(kinds: int) -> str:
    return "".join(
        sign
        for sign, kind in (("+", _C.POSITIVE_INF), ("-", _C.NEGATIVE_INF))
        if kinds & kind
    )


def _tolerated(bad: BadFrame, are_masks: bool) -> list[str]:
    """Lists the inputs that are tolerated although non-finite: masks, or by rules."""
    return [
        entry_label(entry.place)
        for entry in bad.entries()
        if entry.role == _C.Role.INPUT and entry.nonfinite_kinds and not entry.is_bad
        if (entry.nonfinite_kinds == _C.NEGATIVE_INF) == are_masks
    ]


def _headroom_before(bad: BadFrame, entry: _C.Entry) -> EntryHeadroom | None:
    peak = bad.watch.recorder.last_peak(entry.place)
    return None if peak is None else headroom_of(bad.watch, peak)


# The origin.


def _origin_or_why_not(
    first: BadFrame,
    entry: _C.Entry,
    ordered: Sequence[BadFrame],
    watches: Sequence[ModelWatch],
) -> Origin:
    """Finds the origin; if that fails, the alarm is raised all the same."""
    try:
        origin = _origin(first, entry, ordered, watches)
        is_of_call = first.is_of_call and origin.source != "weight"
        remarks = remarks_on(first) if is_of_call else []
        if origin.source in ("unclear", "loss", "after_backward"):
            remarks = [*remarks, *batch_remarks(first)]
        return dataclasses.replace(origin, remarks=remarks)
    except Exception as error:
        message = "The search for the origin of a non-finite value failed."
        _log.warning(message, exc_info=True)
        maker = f"the search for it failed ({type(error).__name__}: {error})"
        return Origin("unclear", "unclear", maker)


def _origin(
    first: BadFrame,
    entry: _C.Entry,
    ordered: Sequence[BadFrame],
    watches: Sequence[ModelWatch],
) -> Origin:
    kind = first.frame.kind
    if entry.role in (_C.Role.WEIGHT, _C.Role.OPTIMIZER_STATE):
        was_finite = _headroom_before(first, entry) is not None
        return origin_of_state(first, entry, was_finite)
    if kind == _C.FrameKind.BUFFERS:
        return _origin_of_buffer(first, entry)
    if kind == _C.FrameKind.RECORDED and is_label(entry.label.name):
        return Origin("unclear", "unclear", OF_FLAG)
    bad, calls = {key_of(each): each for each in ordered}, Calls(watches)
    if kind in FORWARDS:
        return origin_in_forward(first, bad, calls)
    if kind == _C.FrameKind.BACKWARD:
        before = Calls(watches, until=first.frame.order)
        origin = origin_of_gradient(first, before)
    elif kind == _C.FrameKind.GRADIENTS:
        origin = origin_of_gradients(first, ordered)
    else:
        origin = _origin_of_recorded(watches)
    return or_by_state(origin, first, bad, calls)


def _origin_of_recorded(watches: Sequence[ModelWatch]) -> Origin:
    candidates: list[str] = [LOSS, BATCH]
    is_seen = all(w.wanted.activations and w.modules.is_selected(0) for w in watches)
    if is_seen:
        maker = (
            "code after the model, whose outputs were finite, or values that do not "
            "pass through the model, such as labels"
        )
        return Origin("unclear", "loss", maker, candidates)
    maker = "the model, the loss or the batch: the model's outputs were not checked"
    names = [watch.name_at(0) or "the model" for watch in watches]
    return Origin("unclear", "unclear", maker, [*names, *candidates])


def _origin_of_buffer(first: BadFrame, entry: _C.Entry) -> Origin:
    label = label_text(entry.label)
    owner = label.rpartition(".")[0] or "the model"
    seen = "every checked output was finite"
    if _headroom_before(first, entry) is None:
        maker = f"{label}, which was never seen finite; {seen}"
    else:
        maker = f"code that writes to {label}, such as {owner}; {seen}"
    return Origin("unclear", "buffer", maker, [owner])
