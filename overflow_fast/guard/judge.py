"""The judge: one way from what was seen of a unit to what is done about it.

1. detect   the first bad value, and who made it
2. look     what a tripwire has found bad is run again, with every module watched
3. report   it is made, and its evidence begun: `archive.begin_report`
4. agree    ranks that judge together have the report of the earliest bad value
5. explain  the unit is run again, where its kind allows that
6. choose   raise, warn or skip: `policy`, a pure function
7. count    bad units and skips; too many skips in a row raise
8. restore  what the forward has changed is put back
9. write    evidence, log, flight record
10. tell    a warning or an exception

`_agreed()` does 1 to 4, and 1 to 3 for a rank that judges alone. Ranks that judge
together agree on the earliest bad value before they look again, and once more on what
they have seen then. The rank that has it makes the report, and chooses at once, unless
the policy is a callable: that gets the explanation, too.

A finite unit ends behind 4. State: only what ranks need to agree. Numbers are the
ledger's; what is known of a unit is its own, also how it is run again where that is not
the guard's way.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from .. import _C
from ..base.text import error_line
from .core import GuardCore
from .explaining import Explaining
from .kept_calls.left_gradients import LeftGradients, gradients_of
from .ledger import CLEAN, Ledger
from .monitors.running import clauses_of
from .monitors.spikes import SPIKE
from .optimizers.optimizer_hook import OptimizerHook
from .policy import Situation, checked_action, choose
from .ranks.agreement import Agreed, Wishes
from .report.coverage import GuardCoverage
from .report.notice import notices_text
from .report.report import Report
from .report_of_unit import report_of
from .undo.lending import lent
from .unit import RunsAgain, Unit
from .verdict.attribution import attribute
from .verdict.optimizer_settings import bad_settings
from .verdict.repair import is_beyond_repair
from .verdict.verdict import Verdict, is_unseen
from .watching.judged_tensors import JudgedTensors
from .watching.watch import ModelWatch

_log = logging.getLogger("overflow_fast")


class Judge:
    """Judges units: steps, updates, checks, evaluations, exceptions, requests.

    Args:
        guard: The guard's core.
        explaining: Decides what is explained.
        ledger: Has the numbers, and writes down what was judged.
        tensors: The scanned tensors that stand in no call.
        may_overflow: True if a step may overflow although its gradients are finite.
        coverage: What was checked so far by some watches.

    Attributes:
        left: The gradients that the last bad step has left.
        num_agreed: How often ranks have begun to agree.
    """

    def __init__(
        self,
        guard: GuardCore,
        explaining: Explaining,
        ledger: Ledger,
        tensors: JudgedTensors,
        may_overflow: Callable[[OptimizerHook], bool],
        coverage: Callable[[Sequence[ModelWatch]], GuardCoverage],
    ) -> None:
        self._guard = guard
        self._config, self._watches = guard.config, guard.watches
        self._start, self._keeper = guard.undone_to, guard.keeper
        self._explaining = explaining
        self._agreement, self._isolation = guard.agreement, guard.isolation
        self._ledger = ledger
        self._tensors = tensors
        self._may_overflow = may_overflow
        self._coverage = coverage
        self._is_asked = callable(guard.config.on_overflow)
        self._num_frames = _C.Recorder.num_frames()
        keeper = guard.keeper
        self.left = LeftGradients() if keeper is None else keeper.left
        self.num_agreed = 0

    def judge(self, unit: Unit) -> Report | None:
        """Judges a unit.

        Args:
            unit: The unit, with what was seen of it.

        Returns:
            The report if it is bad or skipped, None if it goes on.

        Raises:
            NonFiniteError: If that is the action, unless the program itself has raised.
        """
        unit.is_together = unit.kind.is_shared and self._agreement.is_needed
        agreed, is_broken = self._agreed(unit)
        unit.wishes, report = agreed.wishes, agreed.report
        if report is None:
            return self._end_finite(unit) if unit.kind.ends_finite else None
        is_broken = is_broken or self._explain(unit, agreed, report)
        unit.noted(report)
        if is_broken:  # it may yet be in a collective that the next step would meet
            report.action = "raise"
        elif not unit.is_together:
            self._choose(unit, report)
        elif self._is_asked:
            found = report
            report = self._agreement.act_on(
                agreed.is_own, lambda: self._choose(unit, found)
            )
        self._end_bad(unit, report, agreed.is_own)
        self._ledger.tell(unit, report, agreed.is_own)
        return report

    # Agree: one report for all, of a tripwire's unit as it is seen in full.

    def _agreed(self, unit: Unit) -> tuple[Agreed, bool]:
        """Detects, looks again, begins the report; ranks have agreed on it.

        Returns:
            What was agreed, and whether a rank was lost.
        """
        if not unit.is_together:
            wishes, seen = self._wishes(unit), self._in_full(unit)
            report = self._report_on(seen) if unit.is_bad else None
            return Agreed(report, is_own=True, wishes=wishes), False
        self.num_agreed += 1
        begin, self._num_frames = self._num_frames, _C.Recorder.num_frames()
        agreed = self._agree(unit, begin)
        found = agreed.report
        if found is None or not self._looks_again(unit, found.verdict):
            return agreed, False
        frames = _C.Recorder.num_frames()
        seen, note, is_broken = self._explaining.look_together(unit, agreed)
        if note:
            found.notes.append(note)
            return agreed, is_broken
        full = self._agree(seen, frames)
        if full.report is None:
            found.notes.append(self._explaining.finite_note())
            return agreed, False
        return full, False

    def _again(self, unit: Unit) -> RunsAgain:
        """The way to run a unit again."""
        return unit.again or self._explaining

    def _in_full(self, unit: Unit) -> Unit:
        """A bad unit as a full watch sees it, where it is run again for that."""
        is_looked_at = unit.frames and self._looks_again(unit, self.verdict_on(unit))
        return self._again(unit).look_again(unit) if is_looked_at else unit

    def _looks_again(self, unit: Unit, verdict: Verdict) -> bool:
        """True if a bad tensor is to be looked for again, which may be met again."""
        can_be_found = not is_unseen(verdict)
        is_run_again = unit.has_room and verdict.origin.source != "update"
        return self._again(unit).looks_again and is_run_again and can_be_found

    def _agree(self, unit: Unit, begin: int) -> Agreed:
        """Agrees on the report of the rank that found the first bad value.

        A callable is asked once the unit is explained. Any other policy is followed
        before, so that all ranks know what to do if one is lost in the replay.

        Args:
            unit: This rank's.
            begin: The number of frames before the unit, or its replay.
        """
        verdict, runs_again = self.verdict_on(unit), unit.kind.runs_again
        first = min((bad.frame.order for bad in unit.frames), default=begin)
        position = max(0, first - begin) if runs_again else 0  # an update has no order

        def make() -> Report:
            report = self._report_on(unit)
            return report if self._is_asked else self._choose(unit, report)

        def offer() -> object:
            if not runs_again:
                return None
            ends, joins = self._config.on_overflow == "raise", self._agreement.joins
            return self._explaining.offer(unit, verdict, ends, joins)

        found = unit.number, verdict, position
        return self._agreement.agree(*found, make, offer, self._wishes(unit))

    def _wishes(self, unit: Unit) -> Wishes:
        """The wishes of this rank, and what it has seen in a unit."""
        kinds = [each.kind for each in unit.notices]
        wants_skip = any(each.action == "skip" for each in unit.notices)
        doubts = False
        if unit.is_together and unit.kind.doubts and unit.hook is not None:
            doubts = self._may_overflow(unit.hook)
        return Wishes(SPIKE in kinds, wants_skip, doubts)

    # Detect: the first bad value, and who made it.

    def verdict_on(self, unit: Unit) -> Verdict:
        """The verdict on what was seen of a unit."""
        if unit.verdict is None:
            unit.verdict = self._verdict_on(unit) if unit.frames else CLEAN
        return unit.verdict

    def _verdict_on(self, unit: Unit) -> Verdict:
        watches = unit.watches or self._watches
        is_check = unit.kind.moment == "check"
        start = self._start if unit.can_restore else None
        verdict = attribute(unit.frames, watches, is_check, start)
        if verdict.origin.source not in ("weight", "optimizer_state"):
            return verdict
        with self._isolation.isolated():
            settings = bad_settings(self._guard.optimizers())
            verdict = verdict.with_remarks([*verdict.origin.remarks, *settings])
        return verdict

    # Report and explain.

    def _report_on(self, unit: Unit) -> Report:
        """Makes the report of a bad unit; without details where these fail."""
        verdict = self.verdict_on(unit)
        policy = unit.policy or self._config.on_overflow
        action = policy if isinstance(policy, str) else "warn"
        try:
            report = self._detailed(unit, verdict, action)
        except Exception as error:  # the verdict stands, and other ranks wait for it
            self._isolation.note(error)
            note = f"The guard failed to add details ({type(error).__name__}: {error})."
            report = Report(unit.number, action, verdict, notes=[note])
        if unit.known is not None:
            report.explanation = unit.known
        return unit.made(report)

    def _detailed(self, unit: Unit, verdict: Verdict, action: str) -> Report:
        """Makes the report of a bad unit, and keeps its evidence."""
        watches = unit.watches or self._watches
        report = report_of(unit, verdict, watches, self._config.explain.frames)
        report.action, report.cost = action, self._guard.measurements.timer.cost
        report.not_covered = self._coverage(watches).gaps()
        report.num_skipped = self._ledger.rounds.num_skipped
        tensors = self._tensors if unit.kind.is_scanned else None
        self._ledger.archive.begin_report(report, unit.frames, tensors)
        if unit.explains is not None:  # by the rank that has what it was made of
            report.explanation = self._explaining.explain(
                unit, verdict, self._ends(unit)
            )
        return report

    def _explain(self, unit: Unit, agreed: Agreed, report: Report) -> bool:
        """Explains a report, where that is due; True if a rank was lost."""
        runs_again = unit.kind.runs_again and unit.has_room and unit.known is None
        is_seen = unit.error is not None or not is_unseen(report.verdict)
        if not (runs_again and is_seen):
            return False
        if unit.is_together:
            report.explanation, is_broken = self._explaining.explain_together(
                agreed, unit.kind.moment
            )
            return is_broken
        again = self._again(unit)
        if not again.is_off:
            report.explanation = again.explain(unit, report.verdict, self._ends(unit))
        return False

    def explain_late(self, unit: Unit, report: Report) -> None:
        """Explains a unit that was judged and answered without its explanation.

        Args:
            unit: The unit.
            report: Its report, which has the explanation from then on.
        """
        seen = self._in_full(unit)
        verdict = self.verdict_on(seen)
        report.explanation = self._again(unit).explain(seen, verdict, ends=False)
        report.verdict = verdict
        report.notes += [note for note in seen.notes if note not in report.notes]
        unit.noted(report)
        self._ledger.tell_late(unit, report)

    def _ends(self, unit: Unit) -> bool:
        """True if the run ends with a bad unit."""
        return unit.ends or (unit.policy or self._config.on_overflow) == "raise"

    # Choose: raise, warn or skip.

    def _choose(self, unit: Unit, report: Report) -> Report:
        """Chooses the action; calls the policy if it is the user's callable."""
        policy = unit.policy or self._config.on_overflow
        unanswered: Exception | None = None
        if callable(policy):
            try:
                report.action = self._ask(policy, report)
            except Exception as error:  # it was logged; a program's own goes on
                unanswered = error if unit.error is None else None
        asked = report.action if unanswered is None else "raise"
        situation = self._situation(unit, report, asked)
        choice = choose(asked, situation)
        report.action = choice.action
        report.notes += choice.notes
        is_put_back = situation.is_undone and choice.action != "warn"
        report.is_beyond_repair = situation.is_beyond_repair and not is_put_back
        # Set last: a callable receives a report without what it has yet to decide.
        report.moment, report.skipped_by = unit.kind.moment, unit.skipped_by
        if unit.error is not None:
            report.moment, report.raised = "raised", type(unit.error).__qualname__
            unit.can_restore &= asked != "warn"
        if unanswered is not None:  # it leaves the unit in place of a NonFiniteError
            self._end_bad(unit, report, is_own=True)
            raise unanswered
        return report

    def _situation(self, unit: Unit, report: Report, asked: str) -> Situation:
        may_skip = unit.hook is not None and unit.kind.may_skip
        return Situation(
            can_skip=may_skip and not unit.skipped_by,
            is_skipped=bool(unit.skipped_by),
            is_undone=unit.hook is not None and unit.hook.has_snapshot,
            is_apart=asked == "skip" and self._agreement.is_apart,
            is_beyond_repair=self._is_beyond_repair(unit, report.verdict),
            has_raised=unit.error is not None,
        )

    def _ask(self, policy: Callable[[Report], str], report: Report) -> str:
        try:
            with _C.Unwatched(), self._lent():
                return checked_action(policy(report))
        except Exception as error:
            self._isolation.programs_error = error
            _log.warning(
                "%s\nIts action is unknown, because on_overflow raised %s: %s",
                report.headline(),
                type(error).__name__,
                error,
            )
            raise

    def _lent(self) -> AbstractContextManager[None]:
        """Keeps what other code than a forward writes to the models from `restore`."""
        start = self._start
        return contextlib.nullcontext() if start is None else lent(start.starts)

    def _is_beyond_repair(self, unit: Unit, verdict: Verdict) -> bool:
        """Returns True if the value was bad before the unit, and stays bad."""
        with self._isolation.isolated():
            start = self._start if unit.can_restore else None
            return is_beyond_repair(verdict, self._watches, start)
        return False

    # Act.

    def _end_bad(self, unit: Unit, report: Report, is_own: bool) -> None:
        """Counts a bad unit, puts back what it has changed, and writes it down."""
        self._ledger.count(unit, report)
        if unit.kind.is_scanned:  # its gradients are the step's
            names = self.verdict_on(unit).dirty_gradients
            since = {} if self._keeper is None else self._keeper.left_over
            self.left.note(unit.number, gradients_of(self._watches, names), since)
        if not unit.kind.runs_again and self._keeper is not None:
            self._keeper.clean = None  # kept of this step, before its update was seen
        if report.action != "warn" and unit.can_restore:
            report.notes += self.restore()
        self._ledger.write(unit, report, is_own)

    def restore(self) -> list[str]:
        """Puts back what the forward changed; returns sentences about failures."""
        if self._start is None:
            return []
        try:
            return self._start.restore()
        except Exception as error:  # the action is decided
            self._isolation.note(error)
            return [f"What the forward changed was not put back ({error_line(error)})."]

    def _end_finite(self, unit: Unit) -> Report | None:
        """Ends a finite unit; skips the step if a monitor asks for that."""
        wishes, ledger, hook = unit.wishes, self._ledger, unit.hook
        if not (wishes.has_spike or wishes.wants_skip or unit.notices):
            ledger.end_finite(unit)
            return None
        if wishes.has_spike:
            ledger.note_spike(unit.number)
        can_skip = unit.kind.may_skip and not unit.skipped_by
        can_skip = can_skip and not self._agreement.is_apart
        is_skipped = wishes.wants_skip and can_skip and hook is not None
        notes = self.restore() if is_skipped else []
        clauses = clauses_of(unit.notices, wishes.has_spike, is_skipped)
        if clauses:
            text = notices_text(unit.number, clauses, is_skipped, notes)
            _log.warning("%s", text)
        ledger.archive.log_notices(unit.number, unit.notices, is_skipped)
        ledger.end_finite(unit)
        if not is_skipped or hook is None:
            return None
        return ledger.skip_finite(unit, hook, notes)
