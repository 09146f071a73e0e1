"""The attribution of a step's bad frames: the first bad entry, and its origin.

This is what every alarm has; the search for the origin is `origin.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ... import _C
from ...base.tensors import signs_of
from ...base.tree import entry_label
from ...detector.frames import is_in_part
from ..undo.restore_point import RestorePoint
from ..watching.watch import ModelWatch
from .bad_frames import BadFrame, first_bad, headroom_before, is_finite_now, reach_loss
from .origin import origin_of
from .roles import OF_CALLS, kind_of
from .verdict import BadEntry, Origin, Verdict

_log = logging.getLogger("overflow_fast")


def attribute(
    frames: Sequence[BadFrame],
    watches: Sequence[ModelWatch] = (),
    is_check: bool = False,
    start: RestorePoint | None = None,
) -> Verdict:
    """Finds the first bad entry of a step and its origin.

    Incurs a CPU-GPU sync for each tensor on a device that is scanned again, if
    something is bad.

    Args:
        frames: All bad frames of a step, in any order.
        watches: All watched models; those of the frames if none are given.
        is_check: True if an optimizer that the guard does not have may have stepped
            since the frames of calls.
        start: The models as they were when the step began, or None.

    Returns:
        The verdict; a clean one if there are no frames.
    """
    if not frames:
        return Verdict()
    first, entry, ordered = first_bad(frames, is_check)
    watches = watches or list(dict.fromkeys(bad.watch for bad in frames))
    origin = _origin_or_why_not(first, entry, ordered, watches, start)
    dirty, clean = _around_gradients(ordered)
    return Verdict(
        batch=first.frame.batch,
        first=bad_entry(first, entry),
        origin=origin,
        masks=_tolerated(first, are_masks=True),
        allowed=_tolerated(first, are_masks=False),
        headroom=headroom_before(first, entry),
        num_bad_frames=len(frames),
        dirty_gradients=dirty,
        clean_gradients=clean,
        is_recomputed=first.frame.is_recomputed,
        reaches_loss=reach_loss(frames),
    )


def bad_entry(bad: BadFrame, entry: _C.Entry) -> BadEntry:
    """The entry of a bad frame, as reports have it."""
    stat = entry.stat
    label = entry_label(entry.place)
    is_of_call = entry.role in OF_CALLS
    fqn = bad.watch.name_at(bad.frame.module)
    is_weight = entry.role == _C.Role.WEIGHT and bad.is_of_call
    num_nan = 0 if stat is None else stat.num_nan
    num_inf = 0 if stat is None else stat.num_inf
    if stat is not None and is_in_part(stat):
        num_nan, num_inf = -bool(num_nan), -bool(num_inf)
    if is_weight:
        label = f"{fqn}.{label}".lstrip(".")
    return BadEntry(
        "state" if bad.is_around else kind_of(entry.role),
        fqn if is_of_call else label,
        bad.frame.class_name if is_of_call else "",
        label,
        is_weight and is_finite_now(bad, entry),
        str(entry.reason or "") if entry.is_unseen else "",
        dtype=entry.dtype,
        numel=entry.numel,
        num_nan=num_nan,
        num_inf=num_inf,
        signs=signs_of(entry.nonfinite_kinds),
    )


def _tolerated(bad: BadFrame, are_masks: bool) -> list[str]:
    """Lists the inputs that are tolerated although non-finite: masks, or by rules."""
    return [
        entry_label(entry.place)
        for entry in bad.entries
        if entry.role == _C.Role.INPUT and entry.nonfinite_kinds and not entry.is_bad
        if (entry.nonfinite_kinds == _C.NEGATIVE_INF) == are_masks
    ]


def _around_gradients(ordered: Sequence[BadFrame]) -> tuple[list[str], list[str]]:
    """Returns the parameters with bad gradients, and the nearest with finite ones."""
    dirty: list[str] = []
    clean: list[str] = []
    for bad in ordered:
        if bad.frame.kind != _C.FrameKind.GRADIENTS:
            continue
        entries = [(e.label.name, e.is_bad) for e in bad.entries if not e.is_unseen]
        for i, (name, is_bad) in enumerate(entries):
            if is_bad:
                dirty.append(name)
            elif any(is_near for _, is_near in entries[max(0, i - 1) : i + 2]):
                clean.append(name)
    return dirty, clean


def _origin_or_why_not(
    first: BadFrame,
    entry: _C.Entry,
    ordered: Sequence[BadFrame],
    watches: Sequence[ModelWatch],
    start: RestorePoint | None,
) -> Origin:
    """Finds the origin; if that fails, the alarm is raised all the same."""
    try:
        return origin_of(first, entry, ordered, watches, start)
    except torch.AcceleratorError:
        maker = "the device has failed, and what it holds cannot be read"
        return Origin("unclear", "unclear", maker)
    except Exception as error:
        message = "The search for the origin of a non-finite value failed."
        _log.warning(message, exc_info=True)
        maker = f"the search for it failed ({type(error).__name__}: {error})"
        return Origin("unclear", "unclear", maker)
