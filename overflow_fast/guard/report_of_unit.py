"""The facts of a report that follow from a unit and its verdict alone."""

from __future__ import annotations

from collections.abc import Sequence

from ..detector.frames import frame_texts
from .optimizers.loss_scaling import unknown_scale_notes
from .report.report import Report
from .unit import Unit
from .verdict.bad_frames import leading_frame
from .verdict.entry_headroom import least_headroom
from .verdict.verdict import Verdict
from .watching.watch import ModelWatch

# The kinds of what a step leaves to the next ones.
_STATE = ("weight", "buffer", "optimizer_state", "state")


def report_of(
    unit: Unit, verdict: Verdict, watches: Sequence[ModelWatch], num_frames: int
) -> Report:
    """The report of a bad unit, with neither action nor numbers of the run yet.

    Args:
        unit: The unit.
        verdict: The verdict on it.
        watches: Those that have seen it.
        num_frames: How many calls up to the bad one are shown.
    """
    report = Report(
        step=unit.number,
        action="warn",
        verdict=verdict,
        least_headroom=least_headroom(watches),
        frames=_shown_frames(unit, num_frames),
        notes=[*unit.notes, *unknown_scale_notes(unit.hook, unit.frames)],
    )
    is_of_state = verdict.first is not None and verdict.first.kind in _STATE
    if unit.left_out.num_steps and (is_of_state or verdict.origin.nonfinite_state):
        report.notes.append(str(unit.left_out))
    return report


def _shown_frames(unit: Unit, most: int) -> list[str]:
    """The frames up to the first call that was bad."""
    if not unit.frames:  # of a step that has raised, and no call showed it
        return []
    leading = leading_frame(unit.frames)
    shown = list(leading.watch.frames.before)
    if unit.kind.is_evaluation:  # other threads may run forwards meanwhile
        shown = [each for each in shown if each.batch == leading.frame.batch]
    if not leading.watch.wanted.activations:
        return []
    if leading.is_of_call:
        shown.append(leading.frame)
    return frame_texts(leading.watch, shown[-most:] if most else [])
