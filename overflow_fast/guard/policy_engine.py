"""From a step's bad frames to what is done about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from .. import _C
from ..distributed.agreement import Agreement
from ..recording.watch import ModelWatch
from ..report.alarms import AlarmLog
from ..report.report import Cost, NonFiniteError, Report
from ..verdict.attribution import attribute
from ..verdict.settings import bad_settings
from ..verdict.verdict import Verdict
from .archive import Archive
from .config import GuardConfig
from .explainer import Explainer, make_capture
from .learning import Learning
from .optimizer_hook import OptimizerHook
from .policy import limit_skips
from .rounds import Rounds
from .step_report import StepReporter
from .step_result import StepResult


class PolicyEngine:
    """Decides by the guard's policy, reports, keeps count and evidence.

    Args:
        options: The guard's.
        watches: The watched models.
        rounds: Counts what becomes of the steps.
        cost: Says what the guard costs.
        not_covered: Says what was not looked at.

    Attributes:
        num_agreed: How often it has asked the other ranks.
    """

    def __init__(
        self,
        options: GuardConfig,
        watches: Sequence[ModelWatch],
        rounds: Rounds,
        cost: Callable[[], Cost],
        not_covered: Callable[[], list[str]],
    ) -> None:
        self.agreement = Agreement(
            options.process_group, watches, options.on_overflow != "warn"
        )
        self._options = options
        self._watches = watches
        self._rounds = rounds
        self._in_row = 0
        self._alarms = AlarmLog()
        self.optimizers: Callable[[], Sequence[Optimizer]] = list
        self.on_explained: Callable[[float], None] = lambda _: None
        self.capture = make_capture(options, watches)
        self._num_frames = _C.Recorder.num_frames()
        self._archive = Archive(options, watches, cost)
        self._reporter = StepReporter(
            options, watches, self._archive, cost, not_covered
        )
        self._explainer = Explainer(
            options.explain, options.explain_budget, watches, self.capture
        )
        self._clean_line: tuple[int, Verdict, str | None] | None = None
        self.last_report: Report | None = None
        self.num_bad = 0
        self.num_agreed = 0
        self.learning: Learning | None = None

    @property
    def is_learning(self) -> bool:
        """Whether what is not finite may turn out to be expected."""
        return self.learning is not None and not self.learning.is_over

    def is_foreign(self, error: Exception) -> bool:
        """Whether an error is not the guard's, but a callable's or a group's."""
        callables, groups = self._reporter.callables_error, self.agreement.error
        return error is callables or error is groups

    def decide(self, found: StepResult) -> Report | None:
        """Decides on a step, and says so.

        Returns:
            The report if the step is bad, None if it is clean.

        Raises:
            NonFiniteError: If the policy is to raise, or too many steps in a row have
                been skipped.
        """
        found = self._without_expected(found)
        verdict = self._attribute(found)
        report, is_own = self._agree(found, verdict)
        if report is None:
            self._end_clean(found, verdict)
            return None
        self._count(found, report)
        if report.action != "warn":
            report.notes += found.restore()
        self._publish(found, report, is_own)
        return report

    def _without_expected(self, found: StepResult) -> StepResult:
        if self.learning is None:
            return found
        is_skipped = bool(found.skipped_by) and found.is_of_step
        frames = self.learning.without_expected(
            found.frames, found.is_whole, is_skipped
        )
        return dataclasses.replace(found, frames=frames)

    def _publish(self, found: StepResult, report: Report, is_own: bool) -> None:
        """Writes the report to disk and log, and raises it where that is the action."""
        if is_own:
            self._archive.add_report(report)
        self._log_line(found.step, report.verdict, report.action)
        if report.action == "raise":
            raise NonFiniteError(report)
        if is_own:
            self._alarms.warn(report, self._in_row)

    def _end_clean(self, found: StepResult, verdict: Verdict) -> None:
        if self.learning is not None and found.is_of_step:
            is_clean = found.is_whole and not found.skipped_by
            self.learning.end_step(is_clean, None if found.is_check else found.step)
        skipper = found.skipped_by or None
        if found.gate is None or found.is_late:
            self._in_row = 0
            self._log_line(found.step, verdict, skipper)
        else:  # a round has one line
            before = self._clean_line
            self._clean_line = found.step, verdict, skipper or (before and before[2])
        if found.gate is not None:
            self._rounds.note(found.gate, bool(skipper), is_by_guard=False)

    def end_round(self) -> None:
        """Ends a round of the optimizers."""
        if self._rounds.report is None:
            self._in_row = 0
        if self._clean_line is not None:
            self._log_line(*self._clean_line)

    def _log_line(self, step: int, verdict: Verdict, action: str | None) -> None:
        self._clean_line = None
        self._archive.log(step, verdict, action, self._rounds.num_skipped)

    def _attribute(self, found: StepResult) -> Verdict:
        verdict = attribute(found.frames, self._watches, found.is_check)
        if verdict.source not in ("weight", "optimizer_state"):
            return verdict
        had_finite = not self._in_row and all(w.wanted.gradients for w in self._watches)
        settings = bad_settings(self.optimizers(), had_finite)
        return dataclasses.replace(verdict, remarks=[*verdict.remarks, *settings])

    def _agree(self, found: StepResult, verdict: Verdict) -> tuple[Report | None, bool]:
        """The report to act on, and whether it is this process's own."""

        def make_report() -> Report:
            report = self._reporter.make(found, verdict, self._rounds.num_skipped)
            self._explain(found, report)
            return self._reporter.choose_action(found, report)

        if found.is_of_step and self.agreement.is_needed:
            self.num_agreed += 1
            begin, self._num_frames = self._num_frames, _C.Recorder.num_frames()
            first = min((bad.frame.order for bad in found.frames), default=begin)
            position = max(0, first - begin)
            return self.agreement.agree(found.step, verdict, position, make_report)
        return None if verdict.is_clean else make_report(), True

    def _explain(self, found: StepResult, report: Report) -> None:
        """Replays the step, where that is asked for."""
        report.explanation = self._explainer.explain(
            found.step,
            report.verdict,
            report.action == "raise",
            found.moment,
            self.optimizers(),
        )
        if report.explanation is not None:
            self.on_explained(report.explanation.seconds)

    def metrics(self) -> dict[str, int]:
        """How many steps were bad and skipped."""
        return {
            "bad_steps_total": self.num_bad,
            "skipped_steps_total": self._rounds.num_skipped,
            "consecutive_skips": self._rounds.consecutive_skips,
        }

    def close(self) -> None:
        """Closes the log."""
        self.end_round()
        self._archive.close()

    def _count(self, found: StepResult, report: Report) -> None:
        """Counts the step and what becomes of it; too many skips in a row raise."""
        self.num_bad += 1
        self._in_row += 1
        self.last_report = report
        if found.gate is not None:
            self._count_in_round(found.gate, found, report)
        report.num_skipped = self._rounds.num_skipped

    def _count_in_round(
        self, gate: OptimizerHook, found: StepResult, report: Report
    ) -> None:
        rounds, is_skipped = self._rounds, report.action == "skip"
        rounds.note(gate, is_skipped or bool(found.skipped_by), is_skipped)
        in_row, most = rounds.consecutive_skips, self._options.max_consecutive_skips
        choice = limit_skips(report.action, in_row, most)
        if choice.notes:
            rounds.take_back()
        report.action = choice.action
        report.notes += choice.notes
        if not found.is_late:
            rounds.report = report
