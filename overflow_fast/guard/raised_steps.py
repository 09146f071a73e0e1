"""A step that the program's own code raises out of, as a unit of judgement.

The commonest form of a nan is an exception: a distribution, a decomposition, a check.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from .collect import Collector
from .core import GuardCore
from .error_notes import added_to
from .explaining import Explaining
from .judge import Judge
from .kept_calls.left_gradients import gradients_of
from .optimizers.loss_scaling import without_gradients
from .optimizers.optimizer_hook import OptimizerHook
from .optimizers.updated import of_update
from .report.report import Report
from .unit import RAISED, Unit
from .value_errors import is_of_values, leaves_room
from .verdict.verdict import Verdict

_log = logging.getLogger("overflow_fast")
_IN_NOTES = "The report is in the notes of the exception, which the program may catch."


class RaisedSteps:
    """Makes units of steps that the program's own code raises out of.

    An exception passes several places that ask for a judgement; the first one has it.

    Args:
        guard: The guard's core.
        collector: Collects what was seen.
        judge: Finds the first bad value.
        explaining: Looks for one that no module showed.
    """

    def __init__(
        self,
        guard: GuardCore,
        collector: Collector,
        judge: Judge,
        explaining: Explaining,
    ) -> None:
        self._collector = collector
        self._judge = judge
        self._explaining = explaining
        self._keeper = guard.keeper
        self._num_calls = -1  # how many there were when one was judged

    def seen(
        self,
        error: Exception,
        ends: bool,
        is_in_forward: bool,
        hook: OptimizerHook | None,
        judge_late: Callable[[], None],
    ) -> Unit | None:
        """The step under way with what is bad in it; None where nothing is.

        Args:
            error: See `Pipeline.judge_raised()`, as the next ones.
            ends: See there.
            is_in_forward: See there.
            hook: See there.
            judge_late: Judges the steps before it that are still on their way.
        """
        if self._collector.num_calls == self._num_calls:
            return None  # it was judged where it left a function, and goes on
        optimizer = None if hook is None else hook.optimizer
        try:
            self._scan(is_in_forward, optimizer)
            with added_to(error):
                judge_late()
            unit = self._collected(optimizer)
        except RuntimeError as unreadable:  # as behind an assert on a device
            _log.debug("A step that has raised was not judged: %s", unreadable)
            return None
        unit.error, unit.ends = error, ends
        unit.has_room = leaves_room(error)
        unit.line = _line
        if not is_of_values(error):
            masks, subject = self._collector.masks, f"Step {unit.number}"
            unit.frames = masks.left_out(unit.frames, subject)
        if not unit.frames:
            self._search(unit, error)
        if not unit.is_bad or self._is_left_over(self._judge.verdict_on(unit)):
            return None
        if self._keeper is not None:
            self._keeper.note_raised(error)
        return unit

    def end(self) -> None:
        """Ends the judgement of one."""
        self._num_calls = self._collector.num_calls
        self._collector.end()

    def _scan(
        self, is_in_forward: bool, optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Scans what the step has written, and its gradients."""
        collector = self._collector
        if optimizer is not None and collector.wanted.weights:
            collector.tensors.scan_update(optimizer, has_state=False)
        if not is_in_forward:
            collector.tensors.scan_gradients()
        collector.send()

    def _collected(self, optimizer: torch.optim.Optimizer | None) -> Unit:
        """The unit with the bad frames that are its own."""
        collector, judge = self._collector, self._judge
        unit = collector.begun(RAISED)
        frames = collector.take(unit.last_frame, with_evaluated=True)
        unit.frames = without_gradients(frames) if collector.has_scaler else frames
        if optimizer is not None and unit.frames:
            first = judge.verdict_on(unit).first
            if first is not None and first.kind == "weight" and not first.class_name:
                # No call of the step has seen it so, and none of the gradients is bad.
                unit.verdict = of_update(judge.verdict_on(unit), optimizer)
        return unit

    def _is_left_over(self, verdict: Verdict) -> bool:
        """True if all that is bad are gradients that an earlier step has left."""
        if verdict.first is None or verdict.first.kind != "gradient":
            return False
        dirty, keeper = set(verdict.dirty_gradients), self._keeper
        now = gradients_of(self._collector.watches, verdict.dirty_gradients)
        left = set(self._judge.left.unchanged(list(now.values())))
        if keeper is not None:  # the step may have added to them since
            left |= keeper.left_over.keys()
        return left >= dirty

    def _search(self, unit: Unit, error: Exception) -> None:
        """Looks for a bad value that no module showed, where it may be of one.

        What it has left is run again: the function of `guard.run()`, or a forward.
        """
        keeper = self._keeper
        if keeper is None or not keeper.has_left or not is_of_values(error):
            return
        keeper.note_raised(error, keeper.calls[-1:])
        found = self._explaining.search(unit)
        if found is not None:
            unit.verdict, unit.known = found


def _line(report: Report) -> str:
    return report.short_text(_IN_NOTES)
