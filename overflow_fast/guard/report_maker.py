"""From the bad frames of a step to its report: agree, look again, explain."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from .. import _C
from ..distributed.agreement import Agreed, Agreement
from ..report.report import Report
from ..verdict.hardware import is_of_flag
from ..verdict.verdict import Verdict
from .config import GuardConfig
from .explainer import Explainer
from .monitors.spikes import SPIKE
from .second_look import SecondLook
from .step_report import StepReporter
from .step_result import StepResult


class ReportMaker:
    """Makes the report that all ranks act on, with its explanation.

    Args:
        config: The guard's.
        agreement: The ranks that decide together.
        reporter: Makes this rank's report.
        explainer: Replays the step.
        second_look: Runs a step again that the tripwire has seen; None without one.
        attribute: Attributes the bad frames of a step.
        num_skipped: Returns the number of skipped steps.
        optimizers: Returns the guard's optimizers.
        on_replayed: Called with the seconds that replays took.

    Attributes:
        has_spike: A rank has seen a spike in the last step.
        wants_skip: A monitor of a rank wants to skip the last step.
        num_agreed: The number of times that the ranks have agreed.
    """

    def __init__(
        self,
        config: GuardConfig,
        agreement: Agreement,
        reporter: StepReporter,
        explainer: Explainer,
        second_look: SecondLook | None,
        attribute: Callable[[StepResult], Verdict],
        num_skipped: Callable[[], int],
        optimizers: Callable[[], Sequence[Optimizer]],
        on_replayed: Callable[[float], None],
    ) -> None:
        self._config = config
        self._agreement = agreement
        self._reporter = reporter
        self._explainer = explainer
        self._second_look = second_look
        self._attribute = attribute
        self._num_skipped = num_skipped
        self._optimizers = optimizers
        self._on_replayed = on_replayed
        self._num_frames = _C.Recorder.num_frames()
        self.num_agreed = 0
        self.has_spike = self.wants_skip = False

    @property
    def wants_attention(self) -> bool:
        """True if a rank has a notice of the last step that all act on."""
        return self.has_spike or self.wants_skip

    def make(self, found: StepResult, verdict: Verdict) -> tuple[Report | None, bool]:
        """Returns the report to act on, and whether it is this process's own."""
        self.has_spike, self.wants_skip = _wishes(found)
        if found.is_of_step and self._agreement.is_needed:
            return self._make_together(found, verdict)
        if verdict.is_clean:
            return None, True
        if self._second_look is not None and not is_of_flag(verdict):
            begin = time.perf_counter()
            seen = self._second_look.look(found)
            self._on_replayed(time.perf_counter() - begin)
            if seen.frames is not found.frames:
                verdict = self._attribute(seen)
            found = seen
        report = self._reporter.make(found, verdict, self._num_skipped())
        report.explanation = self._explainer.explain(
            *(found.step, verdict, report.action == "raise", found.moment),
            self._optimizers(),
        )
        self._note_explained(report)
        return self._reporter.choose_action(found, report), True

    def _make_together(
        self, found: StepResult, verdict: Verdict
    ) -> tuple[Report | None, bool]:
        """Agrees with the other ranks, and replays the step with them.

        A callable is asked once it is explained. Any other policy is followed before,
        so that all ranks know what to do if one is lost in the replay.
        """
        self.num_agreed += 1
        begin, self._num_frames = self._num_frames, _C.Recorder.num_frames()
        agreed = self._agree(found, verdict, begin)
        is_broken = False
        first = agreed.report.verdict if agreed.report is not None else None
        looks = first is not None and not is_of_flag(first)
        if self._second_look is not None and looks:
            found, agreed, is_broken = self._look_together(found, agreed)
        report, is_own = agreed.report, agreed.is_own
        self.has_spike, self.wants_skip = agreed.has_spike, agreed.wants_skip
        if report is None:
            return None, is_own
        if not is_broken:
            report.explanation, is_broken = self._explainer.explain_together(
                agreed, found.moment, self._optimizers()
            )
        self._note_explained(report)
        if is_broken:  # it may yet be in a collective that the next step would meet
            report.action = "raise"
        elif callable(self._config.on_overflow):
            own = report
            choose = self._reporter.choose_action
            report = self._agreement.act_on(is_own, lambda: choose(found, own))
        return report, is_own

    def _agree(self, found: StepResult, verdict: Verdict, begin: int) -> Agreed:
        """Agrees on the report of the rank that found the first bad value.

        Args:
            found: This rank's result.
            verdict: What it says.
            begin: The number of frames before the step, or its replay.
        """
        first = min((bad.frame.order for bad in found.frames), default=begin)
        is_asked = callable(self._config.on_overflow)

        def make() -> Report:
            report = self._reporter.make(found, verdict, self._num_skipped())
            return report if is_asked else self._reporter.choose_action(found, report)

        return self._agreement.agree(
            *(found.step, verdict, max(0, first - begin), make),
            lambda: self._explainer.offer(
                *(found.step, verdict, self._config.on_overflow == "raise"),
                self._agreement.joins,
            ),
            *_wishes(found),
        )

    def _look_together(
        self, found: StepResult, agreed: Agreed
    ) -> tuple[StepResult, Agreed, bool]:
        """Looks at a step again with the other ranks, and agrees on what they saw."""
        assert self._second_look is not None and agreed.report is not None
        begin, frames = time.perf_counter(), _C.Recorder.num_frames()
        seen, note, is_broken = self._second_look.look_together(found, agreed)
        self._on_replayed(time.perf_counter() - begin)
        if note:
            agreed.report.notes.append(note)
            return found, agreed, is_broken
        again = self._agree(seen, self._attribute(seen), frames)
        if again.report is None:
            agreed.report.notes.append(self._second_look.finite_note())
            return found, agreed, False
        return seen, again, False

    def _note_explained(self, report: Report) -> None:
        if report.explanation is not None:
            self._on_replayed(report.explanation.seconds)


def _wishes(found: StepResult) -> tuple[bool, bool]:
    """True if this rank has seen a spike, and if a monitor wants to skip."""
    return (
        any(each.kind == SPIKE for each in found.notices),
        any(each.action == "skip" for each in found.notices),
    )
