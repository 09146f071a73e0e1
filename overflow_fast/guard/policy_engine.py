"""Decides what to do about a step's bad frames: attribute, agree, act, report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from ..distributed.agreement import Agreement
from ..recording.watch import ModelWatch
from ..report.alarms import AlarmLog
from ..report.notice_lines import log_notices
from ..report.report import NonFiniteError, Report
from ..state.step_start import StepStart
from ..verdict.attribution import attribute
from ..verdict.settings import bad_settings
from ..verdict.verdict import Verdict
from .archive import Archive
from .config import GuardConfig
from .explainer import Explainer, make_capture
from .learning import Learning
from .measurements import Measurements
from .monitors.running import clauses_of
from .optimizer_hook import OptimizerHook
from .policy import limit_skips
from .report_maker import ReportMaker
from .rounds import Rounds
from .second_look import SecondLook
from .step_report import StepReporter
from .step_result import StepResult


class PolicyEngine:
    """Applies the guard's policy, reports, counts, and keeps evidence.

    Args:
        config: The guard's.
        watches: The watched models.
        rounds: Counts steps and skips.
        measurements: The guard's cost, and its flight record.
        not_covered: Returns sentences about what some watches have not checked.
        optimizers: Returns the guard's optimizers.
        make_watches: Makes watches of the models that look at everything.
        start: The models as they were when the step began, or None.

    Attributes:
        agreement: The ranks that decide together.
        capture: Keeps a step's calls for an explanation, or None.
        last_report: The report of the last bad step, or None.
        learning: Learns rules from clean steps, or None.
        num_bad: The number of bad steps.
        spike_step: The number of the last finite step with a spike, or None.
        num_spikes: The number of these steps.
    """

    def __init__(
        self,
        config: GuardConfig,
        watches: Sequence[ModelWatch],
        rounds: Rounds,
        measurements: Measurements,
        not_covered: Callable[[Sequence[ModelWatch]], list[str]],
        optimizers: Callable[[], Sequence[Optimizer]],
        make_watches: Callable[[], list[ModelWatch]],
        start: StepStart | None,
    ) -> None:
        self.agreement = Agreement(
            config.process_group, watches, config.may_act, optimizers
        )
        self._config = config
        self._watches = watches
        self._rounds = rounds
        self._in_row = 0
        self._alarms = AlarmLog()
        self._optimizers = optimizers
        self.capture = make_capture(config, watches, start)
        timer = measurements.timer
        self._archive = Archive(config, watches, measurements)
        self._reporter = StepReporter(
            config, watches, self._archive, lambda: timer.cost, not_covered
        )
        second_look = None
        if config.is_tripwire and self.capture is not None:
            second_look = SecondLook(self.capture, watches, make_watches)
        self._maker = ReportMaker(
            config,
            self.agreement,
            self._reporter,
            Explainer(config, watches, self.capture, make_watches),
            second_look,
            self._attribute,
            lambda: rounds.num_skipped,
            optimizers,
            timer.leave_out,
        )
        self._clean_line: tuple[int, Verdict, str | None, int] | None = None
        self.last_report: Report | None = None
        self.num_bad = 0
        self.spike_step: int | None = None
        self.num_spikes = 0
        self.learning: Learning | None = None

    @property
    def num_agreed(self) -> int:
        """The number of times that the ranks have agreed."""
        return self._maker.num_agreed

    @property
    def is_learning(self) -> bool:
        """True while rules are learned: bad values may turn out to be expected."""
        return self.learning is not None and not self.learning.is_over

    def is_foreign(self, error: Exception) -> bool:
        """Returns True for an error of the user's callable or of a process group."""
        return error is self._reporter.callables_error or error is self.agreement.error

    def decide(self, found: StepResult) -> Report | None:
        """Decides on a step, and reports it if it is bad.

        Returns:
            The report if the step is bad, None if it is clean.

        Raises:
            NonFiniteError: If the policy is to raise, or too many steps in a row have
                been skipped.
        """
        found = self._without_expected(found)
        verdict = self._attribute(found)
        report, is_own = self._maker.make(found, verdict)
        if report is None and (self._maker.wants_attention or found.notices):
            return self._end_noticed(found, verdict)
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
        self._clean_line, num_skipped = None, self._rounds.num_skipped
        self._archive.log(
            *(found.step, report.verdict, report.action, num_skipped),
            found.left_out.total,
            report,
        )
        if report.action == "raise":
            raise NonFiniteError(report)
        if is_own:
            self._alarms.warn(report, self._in_row)

    def _end_clean(self, found: StepResult, verdict: Verdict) -> None:
        if self.learning is not None and found.is_of_step:
            is_clean = found.is_whole and not found.skipped_by
            self.learning.end_step(is_clean, None if found.is_check else found.step)
        skipper, num_left_out = found.skipped_by or None, found.left_out.total
        if found.hook is None or found.is_late:
            self._in_row = 0
            self._log_line(found.step, verdict, skipper, num_left_out)
        else:  # a round has one line
            before = self._clean_line
            action = skipper or (before and before[2])
            self._clean_line = found.step, verdict, action, num_left_out
        if found.hook is not None:
            self._rounds.note(found.hook, bool(skipper), is_by_guard=False)

    def _end_noticed(self, found: StepResult, verdict: Verdict) -> Report | None:
        """Ends a finite step that a monitor has a notice of; skips it if asked to."""
        has_spike = self._maker.has_spike
        if has_spike:
            self.num_spikes += self.spike_step != found.step
            self.spike_step = found.step
        can_skip = found.can_skip and found.hook is not None
        is_skipped = self._maker.wants_skip and can_skip
        notes = found.restore() if is_skipped else []
        clauses = clauses_of(found.notices, has_spike, is_skipped)
        log_notices(found.step, clauses, is_skipped, notes)
        self._archive.log_notices(found.step, found.notices, is_skipped)
        self._end_clean(found, verdict)
        if not is_skipped or found.hook is None:
            return None
        self._rounds.note(found.hook, is_skipped=True, is_by_guard=True)
        self._clean_line = found.step, verdict, "skip", found.left_out.total
        self._rounds.report = Report(found.step, "skip", verdict)
        return self._rounds.report

    def end_round(self) -> None:
        """Ends a round of the optimizers."""
        if self._rounds.report is None:
            self._in_row = 0
        if self._clean_line is not None:
            self._log_line(*self._clean_line)

    def _log_line(
        self, step: int, verdict: Verdict, action: str | None, num_left_out: int
    ) -> None:
        self._clean_line, num_skipped = None, self._rounds.num_skipped
        self._archive.log(step, verdict, action, num_skipped, num_left_out, None)

    def _attribute(self, found: StepResult) -> Verdict:
        watches = found.watches or self._watches
        verdict = attribute(found.frames, watches, found.is_check)
        if verdict.source not in ("weight", "optimizer_state"):
            return verdict
        had_finite = not self._in_row and all(w.wanted.gradients for w in watches)
        settings = bad_settings(self._optimizers(), had_finite)
        return dataclasses.replace(verdict, remarks=[*verdict.remarks, *settings])

    def metrics(self) -> dict[str, int]:
        """Returns the numbers of bad and skipped steps."""
        return {
            "bad_steps_total": self.num_bad,
            "skipped_steps_total": self._rounds.num_skipped,
            "spikes_total": self.num_spikes,
            "consecutive_skips": self._rounds.consecutive_skips,
        }

    def close(self) -> None:
        """Closes the log."""
        self.end_round()
        self._archive.close()

    def _count(self, found: StepResult, report: Report) -> None:
        """Counts a bad step and its action; too many skips in a row raise."""
        self.num_bad += 1
        self._in_row += 1
        self.last_report = report
        if found.hook is not None:
            self._count_in_round(found.hook, found, report)
        report.num_skipped = self._rounds.num_skipped

    def _count_in_round(
        self, hook: OptimizerHook, found: StepResult, report: Report
    ) -> None:
        rounds, is_skipped = self._rounds, report.action == "skip"
        rounds.note(hook, is_skipped or bool(found.skipped_by), is_skipped)
        in_row, most = rounds.consecutive_skips, self._config.max_consecutive_skips
        choice = limit_skips(report.action, in_row, most)
        if choice.notes:
            rounds.take_back()
        report.action = choice.action
        report.notes += choice.notes
        if not found.is_late:
            rounds.report = report
