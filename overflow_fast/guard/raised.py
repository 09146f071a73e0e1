"""A step that the program's own code raises out of, judged when it does.

The commonest form of a nan is an exception: a distribution, a decomposition, a check.
Imported with the first of them.
"""

from __future__ import annotations

import contextlib
import linecache
import logging
import opcode
import re
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from ..scanner.text import is_of_program
from .explaining import gradients_of
from .optimizers.loss_scaling import without_gradients
from .optimizers.updates import of_update
from .report.report import NonFiniteError, Report
from .step import Step
from .verdict.bad_frames import take_bad, take_evaluated
from .verdict.verdict import Verdict
from .watching.inputs import is_plain
from .watching.judged_tensors import ScanLevel

if TYPE_CHECKING:
    from .optimizers.optimizer_hook import OptimizerHook
    from .pipeline import Pipeline
    from .report.explanation import Explanation

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
    known = None if step.frames else _search(pipeline, step, error)
    if not step.frames and known is None:
        return False
    if _is_left_over(pipeline, pipeline._detect(step)):
        return False
    try:
        _report(pipeline, step, error, ends, known)
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


def _search(pipeline: Pipeline, step: Step, error: Exception) -> Explanation | None:
    """Looks for a bad value that no module showed, where an exception may be of one.

    What it has left is run again: the function of `guard.run()`, or a forward.
    """
    keeper = pipeline.keeper
    if keeper is None or not keeper.has_left or not is_of_values(error):
        return None
    keeper.note_raised(error, keeper.calls[-1:])
    with pipeline._left_out():
        found = pipeline._explaining.search(step)
    if found is None:
        return None
    step.verdict, known = found
    return known


def _report(
    pipeline: Pipeline,
    step: Step,
    error: Exception,
    ends: bool,
    known: Explanation | None = None,
) -> None:
    policy = pipeline._config.on_overflow
    if pipeline.keeper is not None:
        pipeline.keeper.note_raised(error)
    has_room = not isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if known is None and has_room and pipeline._detect(step).origin.source != "update":
        step = pipeline._seen_in_full(step)
    report = pipeline._make_report(step, pipeline._detect(step))
    report.explanation = known
    if known is None and has_room and not pipeline._explaining.is_off:
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
    with contextlib.suppress(NonFiniteError):
        pipeline._publish(step, report, is_own=True)
    if add_report(error, report) and policy != "raise":
        _log.warning("%s", report.short_text(_IN_NOTES))


@contextlib.contextmanager
def _added_to(error: Exception) -> Iterator[None]:
    """Adds a report that is raised within to the program's own exception."""
    try:
        yield
    except NonFiniteError as found:
        add_report(error, found.report)


def add_report(error: Exception, report: Report) -> bool:
    """Adds a report to the program's own exception; see `add_note()`."""
    return add_note(error, report.answer(), report)


def add_note(error: Exception, text: str, whole: object = "") -> bool:
    """Adds a text to an exception, or logs it where that takes no notes.

    Args:
        error: The exception.
        text: The text.
        whole: Logged in place of the text.

    Returns:
        True if it was added.
    """
    try:  # a class may forbid attributes, or have a method of its own that fails
        error.add_note(f"[overflow_fast] {text}")  # Python 3.11
    except Exception:
        _log.warning("%s", whole or text)
        return False
    return True


# Exceptions that a nan or an inf may have led to.


_UNRELATED = (
    *(KeyError, AttributeError, NameError, TypeError, ImportError, OSError),
    *(MemoryError, torch.OutOfMemoryError, NotImplementedError, StopIteration),
)
_WORDS = re.compile(r"\b(infs?|nans?|(non-?)?finite|infinity)\b", re.IGNORECASE)
_HINTS = re.compile(  # the last ones of indices, which a nan has been made
    r"\b(infinite|invalid (numeric|values?)|infeasible|singular|converged?|positive[- ]"
    r"(semi)?definite|between 0 and 1|p_in|elements of std|out of range in self|out of "
    r"bounds)\b",
    re.IGNORECASE,
)
_CHECKS = re.compile(r"nan|\b(is)?_?(inf|finite)", re.IGNORECASE)
_CHAINED = 8  # exceptions, each raised from or within the next; chosen
_RAISES = opcode.opmap["RAISE_VARARGS"]


def is_of_values(error: BaseException) -> bool:
    """True if a nan or an inf may have led to an exception.

    Its text says so, or the program's own lines that raise it; or they do, and a
    variable of theirs holds one. Incurs a CPU-GPU sync for each on a device then.
    """
    chained: BaseException | None = error
    for _ in range(_CHAINED):
        if chained is None or isinstance(chained, _UNRELATED):
            return False
        if _says(chained, _WORDS, _HINTS) or _is_of_check(chained.__traceback__):
            return True
        chained = chained.__cause__ or chained.__context__
    return False


def _is_of_check(last: TracebackType | None) -> bool:
    """True if the program's own code has raised, and has looked at a nan or an inf."""
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or not is_of_program(last.tb_frame.f_code.co_filename):
        return False
    code, line = last.tb_frame.f_code, last.tb_lineno
    if code.co_code[last.tb_lasti] != _RAISES:  # but what it has called
        return False
    lines = linecache.getlines(code.co_filename, last.tb_frame.f_globals)[:line]
    if any(map(_CHECKS.search, [*lines[-1:], _condition_of(lines)])):
        return True
    held = last.tb_frame.f_locals.values()
    found = [each for each in held if is_plain(each) and each.is_floating_point()]
    with torch.no_grad():  # of -inf alone are masks
        return any(
            bool((each != each).any() | (each == torch.inf).any()) for each in found
        )


def _condition_of(lines: list[str]) -> str:
    """The line above the last one that is indented less; "" for none."""
    indents = [len(each) - len(each.lstrip()) for each in lines]
    pairs = zip(reversed(lines[:-1]), reversed(indents[:-1]), strict=True)
    return next((e for e, indent in pairs if e.strip() and indent < indents[-1]), "")


def says_values(error: BaseException) -> bool:
    """True if the text of an exception names nan or inf, as `torch.multinomial`'s."""
    return not isinstance(error, _UNRELATED) and _says(error, _WORDS)


def _says(error: BaseException, *patterns: re.Pattern[str]) -> bool:
    try:
        text = str(error)
    except Exception:  # its class has a text of its own, which fails
        return False
    return any(each.search(text) for each in patterns)
