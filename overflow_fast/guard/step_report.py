"""Makes the report of a bad step, with the action that the policy chooses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ..core.ops import scan
from ..recording.watch import ModelWatch
from ..report.frames import frame_texts
from ..report.report import Cost, Report
from ..verdict.headroom import least_headroom
from ..verdict.remedy import Remedy, remedy_for
from ..verdict.verdict import BadFrame, Verdict, leading_frame
from .archive import Archive
from .config import GuardConfig
from .policy import Situation, checked_action, choose
from .step_result import StepResult

# The kinds of what a step leaves to the next ones.
_STATE = ("weight", "buffer", "optimizer_state")
_log = logging.getLogger("overflow_fast")


class StepReporter:
    """Makes the reports of a guard's bad steps.

    Args:
        config: The guard's.
        watches: The watched models.
        archive: Keeps the evidence.
        cost: Returns the guard's cost.
        not_covered: Returns sentences about what some watches have not checked.

    Attributes:
        callables_error: The last error that the user's policy raised, or None.
    """

    def __init__(
        self,
        config: GuardConfig,
        watches: Sequence[ModelWatch],
        archive: Archive,
        cost: Callable[[], Cost],
        not_covered: Callable[[Sequence[ModelWatch]], list[str]],
    ) -> None:
        self._config = config
        self._watches = watches
        self._archive = archive
        self._cost = cost
        self._not_covered = not_covered
        self.callables_error: Exception | None = None

    def make(self, found: StepResult, verdict: Verdict, num_skipped: int) -> Report:
        """Makes the report of a bad step, and keeps its evidence."""
        policy = self._config.on_overflow
        watches = found.watches or self._watches
        report = Report(
            step=found.step,
            action=policy if isinstance(policy, str) else "warn",
            verdict=verdict,
            least_headroom=least_headroom(watches),
            frames=self._frames(found.frames),
            not_covered=self._not_covered(watches),
            cost=self._cost(),
            num_skipped=num_skipped,
            notes=list(found.notes),
            remedy=_remedy(found.frames, verdict),
        )
        is_of_state = verdict.first is not None and verdict.first.kind in _STATE
        if found.left_out.num_steps and (is_of_state or verdict.nonfinite_state):
            report.notes.append(str(found.left_out))
        report.evidence = self._archive.keep(found.step, found.frames, found.tensors)
        report.repeats = self._archive.earlier_run(found.step, verdict)
        if report.repeats:
            report.notes.append(f"Run {report.repeats} came to the same in this step.")
        return report

    def choose_action(self, found: StepResult, report: Report) -> Report:
        """Chooses the action; calls the policy if it is the user's callable."""
        policy = self._config.on_overflow
        if callable(policy):
            report.action = self._ask(policy, report)
        choice = choose(report.action, self._situation(found, report))
        report.action = choice.action
        report.notes += choice.notes
        # Set last: a callable receives a report without what it has yet to decide.
        report.moment, report.skipped_by = found.moment, found.skipped_by
        return report

    def _situation(self, found: StepResult, report: Report) -> Situation:
        return Situation(
            can_skip=found.can_skip,
            is_skipped=bool(found.skipped_by),
            is_undone=found.hook is not None and found.hook.has_snapshot,
            is_beyond_repair=report.action == "skip"
            and self._is_beyond_repair(found, report.verdict),
        )

    def _is_beyond_repair(self, found: StepResult, verdict: Verdict) -> bool:
        """Returns True if the value was bad before the step, and stays bad."""
        assert verdict.first is not None
        if verdict.first.kind == "optimizer_state":
            return True
        # Weights may also be in place for one call only (functional_call).
        if verdict.first.kind != "weight":
            return False
        weights = [
            weight
            for watch in self._watches
            if (model := watch.model) is not None
            for weight in model.parameters()
        ]
        return any(
            (stat.has_nan or stat.has_inf) and not found.makes_finite(weight)
            for weight, stat in zip(weights, scan(weights), strict=True)
        )

    def _ask(self, policy: Callable[[Report], str], report: Report) -> str:
        try:
            return checked_action(policy(report))
        except Exception as error:
            self.callables_error = error
            _log.warning(
                "%s\nIts action is unknown, because on_overflow raised %s: %s",
                report.headline(),
                type(error).__name__,
                error,
            )
            raise

    def _frames(self, frames: Sequence[BadFrame]) -> list[str]:
        """The frames up to the first call that was bad."""
        leading = leading_frame(frames)
        shown = list(leading.watch.frames.before)
        if not leading.watch.wanted.activations:
            return []
        if leading.is_of_call:
            shown.append(leading.frame)
        most = self._config.explain.frames
        return frame_texts(leading.watch, shown[-most:] if most else [])


def _remedy(frames: Sequence[BadFrame], verdict: Verdict) -> Remedy | None:
    try:
        return remedy_for(frames, verdict)
    except Exception:  # the alarm matters more than its remedy
        _log.warning("No remedy could be found: see the error below.", exc_info=True)
        return None
