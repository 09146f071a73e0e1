"""A step that the program's own code raises out of, judged when it does.

The commonest form of a nan is an exception: a distribution, a decomposition, a check.
Imported with the first of them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .explaining import gradients_of
from .optimizers.loss_scaling import without_gradients
from .optimizers.updates import of_update
from .report.report import NonFiniteError, Report
from .step import Step
from .verdict.verdict import Verdict, take_bad, take_evaluated
from .watching.step_tensors import ScanLevel

if TYPE_CHECKING:
    from .optimizers.optimizer_hook import OptimizerHook
    from .pipeline import Pipeline

_log = logging.getLogger("overflow_fast")
_IN_NOTES = "The report is in the notes of the exception, which the program may catch."


def judge_raised(
    pipeline: Pipeline,
    error: Exception,
    ends: bool,
    is_in_forward: bool,
    hook: OptimizerHook | None,
) -> bool:
    """Judges the step under way; see `Pipeline.judge_raised()`.

    Returns:
        True if there was something bad, which is reported.
    """
    if _num_calls(pipeline) == pipeline.calls_of_raised:
        return False  # it was judged where it left a function, and goes on
    try:
        step = _collected(pipeline, error, is_in_forward, hook)
    except RuntimeError as unreadable:  # as behind an assert on a device
        _log.debug("A step that has raised was not judged: %s", unreadable)
        return False
    if not step.frames or _is_left_over(pipeline, pipeline._detect(step)):
        return False
    try:
        _report(pipeline, step, error, ends)
    finally:
        pipeline.calls_of_raised = _num_calls(pipeline)
        pipeline._end_judgement()
    return True


def _num_calls(pipeline: Pipeline) -> int:
    return sum(watch.total_calls for watch in pipeline._watches)


def _collected(
    pipeline: Pipeline,
    error: Exception,
    is_in_forward: bool,
    hook: OptimizerHook | None,
) -> Step:
    """The step with the bad frames that are its own."""
    optimizer = None if hook is None else hook.optimizer
    if optimizer is not None and pipeline._config.wanted.weights:
        pipeline.tensors.scan_update(optimizer, has_state=False)
    if not is_in_forward and pipeline._config.wanted.gradients:
        pipeline.tensors.scan(None, ScanLevel.GRADIENTS)
    pipeline._send_stats()
    with _added_to(error):
        pipeline.judge_late()
    step = pipeline._new_step(moment="raised")
    step.frames = take_bad(pipeline._watches, step.last_frame)
    step.frames += take_evaluated(pipeline._watches)
    if pipeline._has_scaler:
        step.frames = without_gradients(step.frames)
    pipeline._leave_out_learned(step)
    if optimizer is not None and step.frames:
        first = pipeline._detect(step).first
        if first is not None and first.kind == "weight" and not first.class_name:
            # No call of the step has seen it so, and none of the gradients is bad.
            step.verdict = of_update(pipeline._detect(step), optimizer)
    return step


def _is_left_over(pipeline: Pipeline, verdict: Verdict) -> bool:
    """True if all that is bad are gradients that an earlier step has left."""
    if verdict.first is None or verdict.first.kind != "gradient":
        return False
    dirty, keeper = set(verdict.dirty_gradients), pipeline.keeper
    now = gradients_of(pipeline._watches, verdict.dirty_gradients)
    left = set(pipeline.left.unchanged(set(map(id, now.values()))))
    if keeper is not None:  # the step may have added to them since
        left |= keeper.left_over.keys()
    return left >= dirty


def _report(pipeline: Pipeline, step: Step, error: Exception, ends: bool) -> None:
    policy = pipeline._config.on_overflow
    if pipeline.keeper is not None:
        pipeline.keeper.note_raised(error)
    has_room = not isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if has_room and pipeline._detect(step).source != "update":
        step = pipeline._seen_in_full(step)
    report = pipeline._make_report(step, pipeline._detect(step))
    if has_room and not pipeline._explaining.is_off:
        ends |= policy == "raise"
        with pipeline._left_out():
            report.explanation = pipeline._explaining.explain(
                step, report.verdict, ends
            )
    if callable(policy):
        with contextlib.suppress(Exception):  # it is logged; the program's own goes on
            report.action = pipeline._ask(policy, report)
    is_undone, report.action = report.action != "warn", "raise"
    report.moment, report.raised = "raised", type(error).__qualname__
    report.is_beyond_repair = pipeline._is_beyond_repair(step, report.verdict)
    pipeline._count(step, report)
    if is_undone:
        report.notes += pipeline._restore()
    pipeline._record_step(step.number, None)
    with _added_to(error):
        pipeline._publish(step, report, is_own=True)
    if policy != "raise" and hasattr(error, "add_note"):
        _log.warning("%s", report.short_text(_IN_NOTES))


@contextlib.contextmanager
def _added_to(error: Exception) -> Iterator[None]:
    """Adds a report that is raised within to the program's own exception."""
    try:
        yield
    except NonFiniteError as found:
        add_report(error, found.report)


def add_report(error: Exception, report: Report) -> None:
    """Adds a report to the program's own exception, or logs it."""
    if not add_note(error, report.answer()):
        _log.warning("%s", report)


def add_note(error: Exception, text: str) -> bool:
    """Adds a text to an exception; returns False where Python has no notes."""
    if not hasattr(error, "add_note"):  # Python 3.11
        return False
    error.add_note(f"[overflow_fast] {text}")
    return True
