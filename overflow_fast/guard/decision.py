"""From a step's bad frames to what is done about them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .. import _C
from .agreement import Agreement
from .archive import Archive
from .attribution import judge
from .learning import Learning
from .options import ACTIONS, GuardOptions
from .report import Cost, NonFiniteError, Report, frame_texts, least_headroom
from .step_tensors import StepTensors
from .verdict import BadFrame, Verdict, leading_frame
from .watch import ModelWatch

_log = logging.getLogger("overflow_fast")


@dataclass(frozen=True)
class Finding:
    """What was found in a step, to be decided on.

    Attributes:
        step: The step's number.
        frames: Its bad frames.
        can_skip: Whether the optimizer can still be kept from stepping.
        skipped_by: Who has skipped the step already, or "".
        tensors: What was scanned besides the calls, for evidence.
        notes: What the report should say besides.
        is_of_step: Whether every rank judges it too.
        is_whole: Whether all that the guard watches was looked at, and no gradient is
            bad, whoever's business that may be.
        is_check: Whether nobody counts it: `check()` was called.
    """

    step: int
    frames: list[BadFrame]
    can_skip: bool = False
    skipped_by: str = ""
    tensors: StepTensors | None = None
    notes: list[str] = field(default_factory=list)
    is_of_step: bool = True
    is_whole: bool = False
    is_check: bool = False


class Decision:
    """Decides by the guard's policy, reports, keeps count and evidence.

    Args:
        options: The guard's.
        watches: The watched models.
        cost: Says what the guard costs.
        not_covered: Says what was not looked at.
    """

    def __init__(
        self,
        options: GuardOptions,
        watches: Sequence[ModelWatch],
        cost: Callable[[], Cost],
        not_covered: Callable[[], list[str]],
    ) -> None:
        self.agreement = Agreement(
            options.process_group, watches, options.on_overflow != "warn"
        )
        self._options = options
        self._watches = watches
        self._cost = cost
        self._not_covered = not_covered
        self._consecutive_bad = 0
        self._num_frames = _C.Recorder.num_frames()
        self._archive = Archive(options, watches, cost)
        self.num_skipped = 0
        self.consecutive_skips = 0
        self.last_step_skipped = False
        self.last_report: Report | None = None
        self.num_bad = 0
        self.learning: Learning | None = None
        self._callables_error: Exception | None = None

    @property
    def is_learning(self) -> bool:
        """Whether what is not finite may turn out to be expected."""
        return self.learning is not None and not self.learning.is_over

    def is_foreign(self, error: Exception) -> bool:
        """Whether an error is not the guard's, but a callable's or a group's."""
        return error is self._callables_error or error is self.agreement.error

    def decide(self, found: Finding) -> Report | None:
        """Decides on a step, and says so.

        Returns:
            The report if the step is bad, None if it is clean.

        Raises:
            NonFiniteError: If the policy is to raise, or too many steps in a row have
                been skipped.
        """
        if self.learning is not None:
            is_skipped = bool(found.skipped_by) and found.is_of_step
            frames = self.learning.without_expected(
                found.frames, found.is_whole, is_skipped
            )
            found = dataclasses.replace(found, frames=frames)
        verdict = judge(found.frames)
        report, is_own = self._agreed(found, verdict)
        if report is None:
            if self.learning is not None and found.is_whole and not found.skipped_by:
                self.learning.end_clean_step(None if found.is_check else found.step)
            self._consecutive_bad = self.consecutive_skips = 0
            self.last_step_skipped = bool(found.skipped_by)
            skipper = found.skipped_by or None
            self._archive.log(found.step, verdict, skipper, self.num_skipped)
            return None
        self.num_bad += 1
        self._consecutive_bad += 1
        self._count(report.action, found)
        report = self._with_limit(report)
        self.last_report = report
        if is_own:
            self._archive.keep(report, found.frames, found.tensors)
        self._archive.log(found.step, report.verdict, report.action, self.num_skipped)
        if report.action == "raise":
            raise NonFiniteError(report)
        if is_own:
            self._warn(report)
        return report

    def _agreed(self, found: Finding, verdict: Verdict) -> tuple[Report | None, bool]:
        """The report to act on, and whether it is this process's own."""
        if found.is_of_step and self.agreement.is_needed:
            begin, self._num_frames = self._num_frames, _C.Recorder.num_frames()
            first = min((bad.frame.order for bad in found.frames), default=begin)
            return self.agreement.agree(
                found.step,
                verdict,
                max(0, first - begin),
                lambda: self._report(found, verdict),
            )
        return None if verdict.is_clean else self._report(found, verdict), True

    def metrics(self) -> dict[str, int]:
        """How many steps were bad and skipped."""
        return {
            "bad_steps_total": self.num_bad,
            "skipped_steps_total": self.num_skipped,
            "consecutive_skips": self.consecutive_skips,
        }

    def close(self) -> None:
        """Closes the log."""
        self._archive.close()

    # The report.

    def _report(self, found: Finding, verdict: Verdict) -> Report:
        policy = self._options.on_overflow
        report = Report(
            step=found.step,
            action=policy if isinstance(policy, str) else "warn",
            verdict=verdict,
            least_headroom=least_headroom(self._watches),
            frames=self._frames(found.frames),
            not_covered=self._not_covered(),
            cost=self._cost(),
            num_skipped=self.num_skipped,
            notes=list(found.notes),
        )
        report.evidence = self._archive.folder_of(found.step)
        if callable(policy):
            report.action = self._ask(policy, report)
        if report.action == "skip" and not found.can_skip:
            report.action = "warn"
            if found.skipped_by:
                report.action = "skip"
            else:
                report.notes.append("There was no optimizer's step to skip.")
        if found.skipped_by:
            report.notes.append(f"The {found.skipped_by} has skipped the step.")
        return report

    def _ask(self, policy: Callable[[Report], str | None], report: Report) -> str:
        try:
            return _checked(policy(report))
        except Exception as error:
            self._callables_error = error
            raise

    def _frames(self, frames: Sequence[BadFrame]) -> list[str]:
        """The frames up to the first call that was bad."""
        leading = leading_frame(frames)
        shown = list(leading.watch.before)
        if not leading.watch.wanted.activations:
            return []
        if leading.is_of_call:
            shown.append(leading.frame)
        most = self._options.max_frames
        return frame_texts(leading.watch, shown[-most:] if most else [])

    def _count(self, action: str, found: Finding) -> None:
        is_skipped = action == "skip"
        self.last_step_skipped = is_skipped or bool(found.skipped_by)
        self.consecutive_skips = self.consecutive_skips + 1 if is_skipped else 0
        self.num_skipped += is_skipped

    def _with_limit(self, report: Report) -> Report:
        report.num_skipped = self.num_skipped
        most = self._options.max_consecutive_skips
        if self.consecutive_skips > most:
            report.action = "raise"
            report.notes.append(
                f"{self.consecutive_skips} steps in a row are bad, and "
                f"max_consecutive_skips={most}."
            )
            self.num_skipped -= 1
            self.consecutive_skips = 0
        return report

    def _warn(self, report: Report) -> None:
        count = self._consecutive_bad
        if count == 1:
            _log.warning("%s", report)
        elif report.action == "skip":
            _log.warning("%s", " ".join(report.sentences()[:2]))
        elif count & (count - 1) == 0:
            first = report.sentences()[0]
            _log.warning("%s It is bad step number %d in a row.", first, count)


def _checked(action: object) -> str:
    if action is None:
        return "warn"
    if action not in ACTIONS:
        raise ValueError(
            "on_overflow must return 'raise', 'warn' or 'skip' (None is 'warn'), got "
            f"{action!r}"
        )
    return str(action)
