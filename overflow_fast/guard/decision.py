"""From a step's bad frames to what is done about them."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch.optim import Optimizer

from .. import _C
from ..ops import scan
from .agreement import Agreement
from .archive import Archive
from .attribution import judge
from .learning import Learning
from .optimizers import OptimizerGate
from .options import ACTIONS, GuardOptions
from .remedy import Remedy, remedy_for
from .report import Cost, NonFiniteError, Report, frame_texts, least_headroom
from .rounds import Rounds
from .settings import bad_settings
from .step_tensors import StepTensors
from .verdict import BadFrame, Verdict, leading_frame
from .watch import ModelWatch

_log = logging.getLogger("overflow_fast")
_MAX_PLACES = 10_000
_BEYOND_REPAIR = (
    "It stays non-finite without this step: skipping steps cannot repair it. Load a "
    "checkpoint in which it is finite."
)


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
        gate: The optimizer's that steps, or None.
        restore: Puts back what the forward changed, and says what could not be.
        is_of_step: Whether every rank judges it too.
        is_whole: Whether all that the guard watches was looked at, and no gradient is
            bad, whoever's business that may be.
        is_check: Whether nobody counts it: `check()` was called.
        is_late: Whether the step is over already (`sync="lagged"`).
    """

    step: int
    frames: list[BadFrame]
    can_skip: bool = False
    skipped_by: str = ""
    tensors: StepTensors | None = None
    notes: list[str] = field(default_factory=list)
    gate: OptimizerGate | None = None
    restore: Callable[[], list[str]] = list
    is_of_step: bool = True
    is_whole: bool = False
    is_check: bool = False
    is_late: bool = False

    @property
    def moment(self) -> str:
        """When it was found: see `Report.moment`."""
        if self.is_check:
            return "check"
        if not self.is_of_step:
            return "evaluation"
        return "after" if self.is_late else "before"


class Decision:
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
        options: GuardOptions,
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
        self._cost = cost
        self._not_covered = not_covered
        self._in_row = 0
        self._places: Counter[tuple[str, str, str]] = Counter()
        self.optimizers: Callable[[], Sequence[Optimizer]] = list
        self._num_frames = _C.Recorder.num_frames()
        self._archive = Archive(options, watches, cost)
        self._clean_line: tuple[int, Verdict, str | None] | None = None
        self.last_report: Report | None = None
        self.num_bad = 0
        self.num_agreed = 0
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
        verdict = self._judge(found)
        report, is_own = self._agreed(found, verdict)
        if report is None:
            self._end_clean(found, verdict)
            return None
        self.num_bad += 1
        self._in_row += 1
        self._count(found, report)
        report.num_skipped = self._rounds.num_skipped
        self.last_report = report
        if report.action != "warn":
            report.notes += found.restore()
        if is_own:
            self._archive.add_report(report)
        self._log_line(found.step, report.verdict, report.action)
        if report.action == "raise":
            raise NonFiniteError(report)
        if is_own:
            self._warn(report)
        return report

    def _end_clean(self, found: Finding, verdict: Verdict) -> None:
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

    def _judge(self, found: Finding) -> Verdict:
        verdict = judge(found.frames, self._watches, found.is_check)
        if verdict.source not in ("weight", "optimizer_state"):
            return verdict
        had_finite = not self._in_row and all(w.wanted.gradients for w in self._watches)
        settings = bad_settings(self.optimizers(), had_finite)
        return dataclasses.replace(verdict, remarks=[*verdict.remarks, *settings])

    def _agreed(self, found: Finding, verdict: Verdict) -> tuple[Report | None, bool]:
        """The report to act on, and whether it is this process's own."""
        if found.is_of_step and self.agreement.is_needed:
            self.num_agreed += 1
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
            "skipped_steps_total": self._rounds.num_skipped,
            "consecutive_skips": self._rounds.consecutive_skips,
        }

    def close(self) -> None:
        """Closes the log."""
        self.end_round()
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
            num_skipped=self._rounds.num_skipped,
            notes=list(found.notes),
            remedy=_remedy(found.frames, verdict),
        )
        report.evidence = self._archive.keep(found.step, found.frames, found.tensors)
        if callable(policy):
            report.action = self._ask(policy, report)
        if report.action == "skip" and not found.can_skip:
            report.action = "skip" if found.skipped_by else "warn"
        is_undone = found.gate is not None and found.gate.has_snapshot
        is_skipped = report.action == "skip" and not is_undone
        if is_skipped and self._is_beyond_repair(verdict):
            report.action = "raise"
            report.notes.append(_BEYOND_REPAIR)
        # A callable is given a report that says nothing of what it is to decide.
        report.moment, report.skipped_by = found.moment, found.skipped_by
        return report

    def _is_beyond_repair(self, verdict: Verdict) -> bool:
        """Whether what is bad was bad before the step, and stays so without it."""
        assert verdict.first is not None
        if verdict.first.kind == "optimizer_state":
            return True
        # Weights may also be somebody's for one call only (functional_call).
        return verdict.first.kind == "weight" and any(
            stat.has_nan or stat.has_inf
            for watch in self._watches
            if (model := watch.model) is not None
            for stat in scan(model.parameters())
        )

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

    def _count(self, found: Finding, report: Report) -> None:
        """Counts what becomes of the step; raises after too many in a row."""
        rounds, is_skipped = self._rounds, report.action == "skip"
        if found.gate is None:
            return
        rounds.note(found.gate, is_skipped or bool(found.skipped_by), is_skipped)
        self.limit(report)
        if not found.is_late:
            rounds.report = report

    def limit(self, report: Report) -> None:
        """Turns a report's action to "raise" after too many skips in a row."""
        most, count = (
            self._options.max_consecutive_skips,
            self._rounds.consecutive_skips,
        )
        if count > most:
            self._rounds.take_back()
            report.action = "raise"
            report.notes.append(
                f"{count} steps in a row are bad, and max_consecutive_skips={most}."
            )

    def _warn(self, report: Report) -> None:
        """Logs an alarm: in full where its place is new, later every 2nd, 4th, 8th."""
        first = report.verdict.first
        assert first is not None
        place = first.kind, first.fqn, first.label
        if len(self._places) < _MAX_PLACES or place in self._places:
            self._places[place] += 1
        in_row, of_place = self._in_row, self._places[place]
        if in_row == 1 and of_place == 1:
            _log.warning("%s", report)
            return
        count, what = (
            (in_row, "non-finite step in a row")
            if in_row > 1
            else (of_place, "alarm of this place")
        )
        if count & (count - 1) == 0:
            following = f"the next one logged is the {_ordinal(2 * count)}"
            counted = f"{_ordinal(count)} {what}; {following}."
            _log.warning("%s", report.short_text(counted))


def _ordinal(count: int) -> str:
    is_teen = count % 100 in (11, 12, 13)
    ending = "th" if is_teen else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
    return f"{count}{ending}"


def _remedy(frames: Sequence[BadFrame], verdict: Verdict) -> Remedy | None:
    try:
        return remedy_for(frames, verdict)
    except Exception:  # an alarm is worth more than what to try
        _log.warning("What to try could not be found out.", exc_info=True)
        return None


def _checked(action: object) -> str:
    if action is None:
        return "warn"
    if action not in ACTIONS:
        raise ValueError(
            "on_overflow must return 'raise', 'warn' or 'skip' (None is 'warn'), got "
            f"{action!r}"
        )
    return str(action)
