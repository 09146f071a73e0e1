"""Makes the report of a bad step, and keeps its evidence. Imported by a bad step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..detector.frames import frame_texts
from .optimizers.loss_scaling import unknown_scale_notes
from .report.report import Report
from .step import Step
from .verdict.bad_frames import leading_frame
from .verdict.entry_headroom import least_headroom
from .verdict.verdict import Verdict

if TYPE_CHECKING:
    from .pipeline import Pipeline

# The kinds of what a step leaves to the next ones.
_STATE = ("weight", "buffer", "optimizer_state")


def report_of(pipeline: Pipeline, step: Step, verdict: Verdict) -> Report:
    """Makes the report of a bad step, and keeps its evidence."""
    policy = step.policy or pipeline._config.on_overflow
    watches = step.watches or pipeline._watches
    report = Report(
        step=step.number,
        action=policy if isinstance(policy, str) else "warn",
        verdict=verdict,
        least_headroom=least_headroom(watches),
        frames=_shown_frames(pipeline, step),
        not_covered=pipeline._coverage(watches, []).gaps(),
        cost=pipeline._measurements.timer.cost,
        num_skipped=pipeline.rounds.num_skipped,
        notes=[*step.notes, *unknown_scale_notes(step.hook, step.frames)],
    )
    is_of_state = verdict.first is not None and verdict.first.kind in _STATE
    if step.left_out.num_steps and (is_of_state or verdict.origin.nonfinite_state):
        report.notes.append(str(step.left_out))
    # Others are judged when the tensors of a later step have been scanned.
    is_scanned = step.moment in ("before", "check", "raised")
    tensors = pipeline.tensors if is_scanned else None
    pipeline._archive.begin_report(report, step.frames, tensors)
    if report.repeats:
        report.notes.append(f"Run {report.repeats} came to the same in this step.")
    return report


def _shown_frames(pipeline: Pipeline, step: Step) -> list[str]:
    """The frames up to the first call that was bad."""
    if not step.frames:  # of a step that has raised, and no call showed it
        return []
    leading = leading_frame(step.frames)
    shown = list(leading.watch.frames.before)
    if step.moment == "evaluation":  # other threads may run forwards meanwhile
        shown = [each for each in shown if each.batch == leading.frame.batch]
    if not leading.watch.wanted.activations:
        return []
    if leading.is_of_call:
        shown.append(leading.frame)
    most = pipeline._config.explain.frames
    return frame_texts(leading.watch, shown[-most:] if most else [])
