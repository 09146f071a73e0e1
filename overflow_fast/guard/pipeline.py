"""A step of a guarded run: collected, judged, agreed on, decided, reported."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from .. import _C, flags
from ..capture.schedule import LeftOut, ScanLevel, WatchSchedule
from ..capture.step_tensors import StepTensors
from ..capture.watch import ModelWatch
from ..core.ops import scan
from ..distributed.agreement import Agreed, Agreement
from ..record.flight import FlightRecorder
from ..report.alarms import AlarmLog
from ..report.frames import frame_texts
from ..report.report import Cost, NonFiniteError, Report
from ..report.run_log import log_left_out, log_notices
from ..state.step_start import StepStart
from ..verdict.attribution import attribute
from ..verdict.headroom import HeadroomTracker, least_headroom
from ..verdict.remedy import Float32Region, remedy_for
from ..verdict.verdict import BadFrame, Verdict, bad_settings, is_of_flag, leading_frame
from . import optimizers as scalers
from .archive import Archive, Measurements
from .config import GuardConfig
from .device_flags import DeviceFlags
from .explainer import Explainer, SecondLook, make_capture
from .isolation import ErrorIsolation
from .learning import Learning
from .monitors.monitor import Notice
from .monitors.running import RunningMonitors, clauses_of
from .monitors.spikes import SPIKE
from .optimizers import (
    SCALER,
    OptimizerHook,
    has_skipped,
    will_skip,
    without_expected,
    without_gradients,
)
from .policy import Situation, checked_action, choose, limit_skips
from .step_result import PendingStep, StepFrames, StepResult

# Makes the report of a bad step, with the action that the policy chooses.


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


def _remedy(frames: Sequence[BadFrame], verdict: Verdict) -> Float32Region | None:
    try:
        return remedy_for(frames, verdict)
    except Exception:  # the alarm matters more than its remedy
        _log.warning("No remedy could be found: see the error below.", exc_info=True)
        return None


# From the bad frames of a step to its report: agree, look again, explain.


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


# Rounds of several optimizers: steps, skipped steps, and skips in a row.


class Rounds:
    """Counts rounds: one ends when each optimizer has stepped, or one steps again.

    A round has one verdict: a bad one holds for all optimizers that step later in it.

    Args:
        hooks: The optimizers' hooks.

    Attributes:
        report: The report of the round, if it is bad.
        is_skipped: A step was skipped in this round, by the guard or a GradScaler.
        num_skipped: The number of rounds in which the guard has skipped a step.
    """

    def __init__(self, hooks: list[OptimizerHook]) -> None:
        self._hooks = hooks
        self._stepped: set[OptimizerHook] = set()
        self._skips_in_row = dict.fromkeys(hooks, 0)
        self._was_skipped = dict.fromkeys(hooks, False)
        self._is_over = False
        self._is_counted = False
        self.is_skipped = False
        self.report: Report | None = None
        self.num_skipped = 0

    def has_stepped(self, hook: OptimizerHook) -> bool:
        """Returns True if an optimizer has stepped in this round."""
        return hook in self._stepped

    def begin(self) -> None:
        """Begins a round if the last is over. Until then the last can be read."""
        if self._is_over:
            self._is_over = self._is_counted = self.is_skipped = False
            self.report = None

    def end(self) -> None:
        """Ends the round."""
        self._stepped.clear()
        self._is_over = True

    def note_step(self, hook: OptimizerHook) -> bool:
        """Notes the end of an optimizer's step; returns True if it ends the round."""
        self._stepped.add(hook)
        return len(self._stepped) == len(self._hooks)

    def note(self, hook: OptimizerHook, is_skipped: bool, is_by_guard: bool) -> None:
        """Notes whether an optimizer's step is skipped.

        Args:
            hook: The optimizer's.
            is_skipped: It is skipped, by the guard or by other code.
            is_by_guard: The round is bad, and the guard skips it.
        """
        self._was_skipped[hook] = is_skipped
        self.is_skipped |= is_skipped
        self._skips_in_row[hook] = self._skips_in_row[hook] + 1 if is_by_guard else 0
        if is_by_guard and not self._is_counted:
            self._is_counted = True
            self.num_skipped += 1

    def note_unwatched(self, hook: OptimizerHook) -> None:
        """Notes a step that is not judged: it resets no count."""
        self._was_skipped[hook] = False

    def take_back(self) -> None:
        """Uncounts the skip of the round: it raises instead."""
        self._skips_in_row = dict.fromkeys(self._hooks, 0)
        if self._is_counted:
            self._is_counted = False
            self.num_skipped -= 1

    @property
    def consecutive_skips(self) -> int:
        """The steps in a row that the guard skipped, of the worst optimizer."""
        return max(self._skips_in_row.values(), default=0)

    def was_skipped(self, optimizer: object) -> bool:
        """Returns True if the last step of one optimizer was skipped, by any code.

        Raises:
            ValueError: If the guard does not have it.
        """
        for hook in self._hooks:
            if hook.is_of(optimizer):
                return self._was_skipped[hook]
        raise ValueError(
            "optimizer must be one that the guard was given, got another "
            f"{type(optimizer).__name__}"
        )


# Decides what to do about a step's bad frames: attribute, agree, act, report.


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


# The step at hand: its number, and how much of it is watched.


class StepClock:
    """Numbers the steps, and attaches the hooks that each of them needs.

    Args:
        schedule: Chooses how much of each step is watched.
        watches: The watched models.
        headroom: Tracks the headroom of the watched steps.
        start: The models as they were when the step began, or None.
        acts: The policy may do more than warn, where a step is judged.

    Attributes:
        step: The number of the step at hand.
        num_steps: The number of steps that are over.
        level: How much of the step is watched.
        left_out: The steps before the one at hand that were not judged.
        on_begin: Called when a watched step begins.
    """

    def __init__(
        self,
        schedule: WatchSchedule,
        watches: Sequence[ModelWatch],
        headroom: HeadroomTracker,
        start: StepStart | None,
        acts: bool,
    ) -> None:
        self._schedule = schedule
        self._watches = watches
        self._headroom = headroom
        self._start = start
        self._warns = acts
        self._is_running = False
        self.step = 0
        self.num_steps = 0
        self.level = ScanLevel.OFF
        self.left_out = LeftOut()
        self.on_begin: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Begins to watch."""
        self._is_running = True
        self.begin()

    def stop(self) -> None:
        """Detaches all hooks."""
        self._is_running = False
        self.level = ScanLevel.OFF
        for watch in self._watches:
            watch.detach()

    def set_level(self, level: ScanLevel) -> None:
        """Attaches the hooks that a step of this level needs, and removes others."""
        self.level = level
        self._headroom.begin_step()
        for watch in self._watches:
            watch.attach() if level is ScanLevel.ALL else watch.pause()
        if self._start is not None and level is not ScanLevel.OFF:
            self._start.prepare()

    def set_step(self, number: int) -> None:
        """Gives the step at hand another number, from which the next ones count."""
        if number == self.step:
            return
        self._schedule.move(number - self.step)
        self.step = number
        if self._is_running:
            self.begin()

    def advance(self) -> None:
        """Ends the step at hand; `begin()` begins to watch the next."""
        left_out_by = self._schedule.left_out_by
        self.left_out = self.left_out.and_step(self.level, left_out_by)
        self.step += 1
        self.num_steps += 1

    def note(self, cost: Cost, is_bad: bool) -> None:
        """Notes what the step before has cost, for the schedule.

        Args:
            cost: The cost.
            is_bad: The step was bad: the next is watched as a whole.
        """
        if is_bad:
            self._schedule.alarm()
        seconds = cost.guard_seconds, cost.step_seconds
        self._schedule.note(self.step - 1, self.level, *seconds)

    def begin(self) -> None:
        """Begins to watch the step at hand."""
        self.set_level(self._schedule.level(self.step))
        if self._warns and self._schedule.left_out_by == "budget":
            self._warns = False
            log_left_out(self._schedule, self.step)
        if self.level is not ScanLevel.OFF:
            self.on_begin()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Watches nothing within; findings from before are judged as usual."""
        for watch in self._watches:
            watch.pause()
        try:
            yield
        finally:
            if self._is_running:
                self.set_level(self.level)


# Asks devices' overflow flags, once a step, and adds what they say to it.


class StepFlags:
    """The overflow flags of the devices of watched models, where there are any.

    Args:
        watches: The watched models.
        clock: Says when a watched step begins.
    """

    def __init__(self, watches: Sequence[ModelWatch], clock: StepClock) -> None:
        self._watches = watches
        clock.on_begin = self.clear

    def clear(self) -> None:
        """Clears the flags, when a watched step begins."""
        for device_type, flag in self._flags().items():
            flags.attempt(device_type, flag.clear)

    def ask(self, level: ScanLevel, scaler: GradScaler | None = None) -> None:
        """Reads the flags; one that is set is an entry of the step that is inf.

        Args:
            level: How much of the step is watched.
            scaler: The GradScaler that makes the step, or None. A scaler asks the flag
                itself, and takes it for a scale that is too large.
        """
        if level is ScanLevel.OFF or scaler is not None:
            return
        for device_type, flag in self._flags().items():
            found = flags.attempt(device_type, flag.read)
            if isinstance(found, torch.Tensor):
                is_set = found.detach().reshape(-1)[:1] != 0
                value = torch.zeros_like(is_set, dtype=torch.float32)
                self._record(device_type, value.masked_fill_(is_set, torch.inf))
            elif found:
                self._record(device_type, torch.full((1,), torch.inf, device="cpu"))

    def _record(self, device_type: str, value: torch.Tensor) -> None:
        named = [flags.label_of(device_type)], [value]
        self._watches[0].record(_C.FrameKind.RECORDED, named)

    def _flags(self) -> dict[str, flags.DeviceFlag]:
        if not flags.are_there():
            return {}
        models = [watch.model for watch in self._watches]
        found = [model for model in models if model is not None]
        return flags.registered(p.device.type for m in found for p in m.parameters())


class StepJudge:
    """Collects a step's bad frames and passes them to the policy.

    Every judgement raises `NonFiniteError` if that is the action.

    Args:
        config: The guard's.
        watches: The watched models.
        engine: Decides what to do about bad frames.
        clock: Has the step's number, and how much of it is checked.
        start: The models as they were when the step began, or None.

    Attributes:
        start: The models as they were when the step began, or None.
        flags: Skip steps on the device.
        tensors: Scans what stands in no module's call.
        overflow_flags: Asks the devices' own overflow flags.
        has_scaler: A GradScaler has called an optimizer.
    """

    def __init__(
        self,
        config: GuardConfig,
        watches: Sequence[ModelWatch],
        engine: PolicyEngine,
        clock: StepClock,
        start: StepStart | None,
        monitors: RunningMonitors,
    ) -> None:
        self._watches = watches
        self._engine = engine
        self._clock = clock
        self.start = start
        self._may_restore = config.may_restore
        self._frames = StepFrames(watches)
        self.flags = DeviceFlags(config, watches)
        self._monitors = monitors
        self.has_scaler = False
        self.tensors = StepTensors(watches, config.weights_every)
        self.overflow_flags = StepFlags(watches, clock)

    def judge_step(
        self,
        hook: OptimizerHook,
        scaler: GradScaler | None,
        others: Sequence[Optimizer],
    ) -> bool:
        """Judges a step that an optimizer is about to make; returns True to skip it.

        Args:
            hook: The optimizer's.
            scaler: The GradScaler that calls it, or None.
            others: The optimizers that step later in the round.
        """
        self.has_scaler |= scaler is not None
        # Without a batch the gradients are those of an earlier step.
        shadows = self._engine.agreement.is_shadowing
        level = ScanLevel.OFF if shadows else self._clock.level
        self.tensors.scan(hook.optimizer, level, () if scaler else others)
        self.overflow_flags.ask(level, scaler)
        is_learning = self._engine.is_learning
        is_lagged = self.flags.are_lagged(hook, is_learning)
        self._frames.send(is_lagged)
        if is_learning:
            self.flags.drop()
        left_out = self._clock.left_out
        step = PendingStep(self._clock.step, hook, scaler, left_out=left_out)
        if is_lagged:
            self.flags.skip(step, hook, self.start if self._may_restore else None)
        try:
            self.judge_late(is_lagged)
            # Ranks decide together, once for each step.
            waits = is_lagged and self._engine.agreement.is_needed
            frames = [] if waits else self._frames.take(step)
            found = self._result(step, hook, frames, level)
            if is_lagged:
                self._frames.postpone(step)
                if not found.frames:
                    return False
            step.is_decided = True
            report = self._engine.decide(found)
            return report is not None and report.action == "skip"
        finally:
            self._end(is_lagged)

    def _result(
        self,
        step: PendingStep,
        hook: OptimizerHook,
        frames: list[BadFrame],
        level: ScanLevel,
    ) -> StepResult:
        is_whole = _is_whole(frames, level)
        frames, skipped_by = without_expected(
            frames, step.scaler, lambda scaler: will_skip(scaler, hook.optimizer)
        )
        if hook.is_skipped_elsewhere:
            skipped_by = "other guard"
        return StepResult(
            step.number,
            frames,
            can_skip=not skipped_by,
            skipped_by=skipped_by,
            tensors=self.tensors,
            hook=hook,
            restore=self.restore,
            makes_finite=self._makes_finite,
            is_whole=is_whole,
            notices=[] if frames else self._look(step, hook, level),
            left_out=step.left_out,
        )

    def _look(
        self, step: PendingStep, hook: OptimizerHook, level: ScanLevel
    ) -> list[Notice]:
        if level is ScanLevel.OFF:
            return []
        is_scaled, is_whole = step.scaler is not None, level is ScanLevel.ALL
        return self._monitors.look(step.number, hook.optimizer, is_scaled, is_whole)

    def judge_scaler_skip(self, hook: OptimizerHook, scaler: GradScaler) -> None:
        """Judges a step that a GradScaler has skipped.

        Inf gradients are expected under a scale, and left to the scaler; they are
        reported only once its scale has dropped to 1. Incurs a CPU-GPU sync, as the
        scaler just did.
        """
        self.has_scaler = True
        self.tensors.scan(hook.optimizer, self._clock.level)
        self._frames.send()
        try:
            self.judge_late(is_lagged=False)
            frames = self._frames.take(PendingStep(self._clock.step))
            if scaler.get_scale() > 1:
                frames = without_gradients(frames)
            found = StepResult(
                self._clock.step,
                frames,
                skipped_by=SCALER,
                tensors=self.tensors,
                hook=hook,
                restore=self.restore,
                left_out=self._clock.left_out,
            )
            self._engine.decide(found)
        finally:
            self._end(is_lagged=False)

    def pass_over(self, is_skipped: bool) -> None:
        """Drops what was found since the last judgement: the round is bad already.

        Args:
            is_skipped: Put back what the forward changed.
        """
        self._frames.send()
        self.judge_late(is_lagged=False)
        self._frames.take(PendingStep(0))
        if is_skipped:
            self.restore()
        self._end(is_lagged=False)

    def judge_now(self) -> Report | None:
        """Judges all that has run, and the state, whatever the step's level is.

        Incurs the sync.

        Returns:
            The report of what is bad, or None.
        """
        level = self._clock.level
        self.tensors.begin_round()
        self.tensors.scan(None, ScanLevel.ALL)
        self.overflow_flags.ask(level)
        self._frames.send()
        try:
            self.judge_late(is_lagged=False)
            frames = self._frames.take(PendingStep(self._clock.step))
            frames += self._frames.take_evaluated(*self._watches)
            found = StepResult(
                self._clock.step,
                frames,
                tensors=self.tensors,
                is_whole=_is_whole(frames, level),
                is_check=True,
                left_out=self._clock.left_out,
            )
            return self._engine.decide(found)
        finally:
            self._end(is_lagged=False)

    def judge_late(self, is_lagged: bool = False) -> None:
        """Judges the steps that are still on their way. Incurs the sync.

        Args:
            is_lagged: Wait only for steps before the last.
        """
        for step, frames in self._frames.receive(is_lagged):
            frames, skipped_by = without_expected(frames, step.scaler, has_skipped)
            if frames:
                skipped_by = skipped_by or step.skipped_by
            if frames or not step.is_decided:
                found = StepResult(
                    step.number,
                    frames,
                    skipped_by=skipped_by,
                    hook=step.hook,
                    is_late=True,
                    left_out=step.left_out,
                )
                self._engine.decide(found)

    def judge_evaluated(self, watch: ModelWatch) -> None:
        """Judges a forward without autograd: at once on the CPU, else lagged."""
        frames = self._frames.take_evaluated(watch)
        if frames:
            model = watch.model
            if self.start is not None and model is not None and model.training:
                self.start.hold(watch)
            found = StepResult(
                self._clock.step,
                frames,
                restore=self.restore,
                is_of_step=False,
                left_out=self._clock.left_out,
            )
            self._engine.decide(found)

    def forget(self) -> None:
        """Forgets what has run and was not judged."""
        self._frames.forget()
        self._end(is_lagged=False)

    def restore(self) -> list[str]:
        """Puts back what the forward changed; returns sentences about failures."""
        if self.start is None or not self._may_restore:
            return []
        return self.start.restore()

    def _makes_finite(self, weight: torch.Tensor) -> bool:
        """True for a weight that the forward has written to, and that was finite."""
        start = self.start
        if start is None or not self._may_restore or not start.written_in_step(weight):
            return False
        held = start.held(weight)
        return held is not None and bool(held.isfinite().all())

    def _end(self, is_lagged: bool) -> None:
        self.tensors.forget()
        self._frames.end(is_lagged)


def _is_whole(frames: Sequence[BadFrame], level: ScanLevel) -> bool:
    return level is ScanLevel.ALL and not any(bad.is_gradient for bad in frames)


# The flight record of a guard, where one was asked for.


class StepRecord:
    """Passes what became of each step to the flight recorder, if there is one.

    Args:
        recorder: Keeps the record, or None.
        isolation: Isolates the guard's own errors.
        engine: Has the last report.
        rounds: Has what became of the optimizers' steps.
    """

    def __init__(
        self,
        recorder: FlightRecorder | None,
        isolation: ErrorIsolation,
        engine: PolicyEngine,
        rounds: Rounds,
    ) -> None:
        self._recorder = recorder
        self._isolation = isolation
        self._engine = engine
        self._rounds = rounds

    def scan_loss_scale(self, scaler: GradScaler | None) -> None:
        """Adds a scaler's scale to the step. Does not incur a CPU-GPU sync."""
        if self._recorder is not None and scaler is not None:
            with self._isolation.isolated():
                self._recorder.scan_loss_scale(scaler)

    def end_step(
        self, step: int, cost: Cost | None, optimizers: Sequence[Optimizer]
    ) -> None:
        """Ends the step; its cost is None where it was not measured."""
        if self._recorder is None:
            return
        report, is_skipped = self._engine.last_report, self._rounds.is_skipped
        has_spike = self._engine.spike_step == step
        with self._isolation.measured():
            self._recorder.end_step(
                step, cost, optimizers, report, is_skipped, has_spike
            )

    def close(self) -> None:
        """Writes what is known of the last step, and closes the file."""
        if self._recorder is not None:
            with self._isolation.isolated():
                self._recorder.close(self._engine.last_report)


# Judges the steps that optimizers and GradScalers make, and counts their rounds.


class OptimizerSteps:
    """Receives the calls of optimizers and scalers.

    A step is a round of all optimizers: it is over when each has stepped, or when one
    of them is about to step again.

    Args:
        hooks: The hooks of the optimizers.
        rounds: Counts the rounds.
        judge: Judges a step.
        engine: Decides where there is nothing to judge.
        isolation: Isolates the guard's own errors.
        clock: Has the step's number and level.
        measurements: Measures the watched steps.
        monitors: The monitors.
        joins_unwatched: Other ranks may watch a step that this one does not.

    Attributes:
        record: The flight record.
    """

    def __init__(
        self,
        hooks: Sequence[OptimizerHook],
        rounds: Rounds,
        judge: StepJudge,
        engine: PolicyEngine,
        isolation: ErrorIsolation,
        clock: StepClock,
        measurements: Measurements,
        monitors: RunningMonitors,
        joins_unwatched: bool,
    ) -> None:
        self._hooks = hooks
        self._rounds = rounds
        self._judge = judge
        self._engine = engine
        self._isolation = isolation
        self._clock = clock
        self._joins_unwatched = joins_unwatched
        self._measurements = measurements
        self._monitors = monitors
        self.record = StepRecord(measurements.record, isolation, engine, rounds)
        self._last_seen: Report | None = None
        self._called: set[OptimizerHook] = set()

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that still exist."""
        found = [hook.optimizer for hook in self._hooks]
        return [optimizer for optimizer in found if optimizer is not None]

    def attach(self) -> None:
        """Hooks the optimizers, and GradScalers."""
        for hook in self._hooks:
            hook.attach()
        scalers.listen(self)
        self._monitors.begin_step(self._clock.step)

    def detach(self) -> None:
        """Removes the hooks."""
        scalers.stop_listening(self)
        self._monitors.stop()
        for hook in self._hooks:
            hook.detach()

    # Called by the optimizers' hooks.

    def before_step(self, hook: OptimizerHook) -> bool:
        """Judges a step that an optimizer is about to make; True skips it.

        Raises:
            NonFiniteError: If the policy is to raise.
        """
        if self._rounds.has_stepped(hook):
            self._end_round()
        self._rounds.begin()
        self._called.add(hook)
        if not self._is_judged:
            self._rounds.note_unwatched(hook)
            return False
        try:
            with self._isolation.measured():
                is_skipped = self._judge_step(hook)
                hook.notify_wrapper(is_skipped)
                return is_skipped
        except NonFiniteError:
            self.after_step(hook, is_skipped=True)  # the hook does not call it then
            raise
        return False

    def _judge_step(self, hook: OptimizerHook) -> bool:
        if self._rounds.report is not None:
            return self._pass_over(hook, self._rounds.report)
        scaler = scalers.scaler_of(hook.layers)
        self.record.scan_loss_scale(scaler)
        others = [
            optimizer
            for other in self._hooks
            if other is not hook and not self._rounds.has_stepped(other)
            if (optimizer := other.optimizer) is not None
        ]
        engine, num_agreed = self._engine, self._engine.num_agreed
        try:
            return self._judge.judge_step(hook, scaler, others)
        except NonFiniteError:
            raise
        except Exception as error:
            if engine.num_agreed > num_agreed or engine.is_foreign(error):
                raise
            self._isolation.note(error)
            return self._join_others(hook)

    def _join_others(self, hook: OptimizerHook) -> bool:
        """Decides with the other ranks, which wait, without a finding of one's own."""
        if not self._engine.agreement.is_needed:
            return False
        found = StepResult(self._clock.step, [], hook=hook, restore=self._judge.restore)
        report = self._engine.decide(found)
        return report is not None and report.action == "skip"

    def _pass_over(self, hook: OptimizerHook, report: Report) -> bool:
        """Applies the verdict of a round that is bad to another of its steps."""
        is_skipped = report.action == "skip"
        self._judge.pass_over(is_skipped)
        self._rounds.note(hook, is_skipped, is_skipped)
        if report.action == "raise":
            raise NonFiniteError(report)
        return is_skipped

    def after_step(self, hook: OptimizerHook, is_skipped: bool) -> None:
        """Counts an optimizer's step, which was made or skipped."""
        start = self._judge.start
        if start is not None:
            with self._isolation.measured():
                start.end() if is_skipped else start.keep()
        if self._rounds.note_step(hook):
            self._end_round()

    # Called by GradScalers.

    def before_scaler_step(self, optimizer: Optimizer) -> None:
        """Prepares to notice whether a scaler lets its optimizer step."""
        for hook in self._hooks:
            if hook.is_of(optimizer):
                self._called.discard(hook)
                hook.cover()

    def after_scaler_step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Judges a step that a GradScaler has skipped."""
        for hook in self._hooks:
            if hook.is_of(optimizer) and hook not in self._called:
                self._after_scaler_skip(hook, scaler)

    def _after_scaler_skip(self, hook: OptimizerHook, scaler: GradScaler) -> None:
        if self._rounds.has_stepped(hook):
            self._end_round()
        self._rounds.begin()
        try:
            if self._is_judged:
                with self._isolation.measured():
                    self._judge_scaler_skip(hook, scaler)
        finally:
            self.after_step(hook, is_skipped=self._rounds.is_skipped)

    def _judge_scaler_skip(self, hook: OptimizerHook, scaler: GradScaler) -> None:
        if self._rounds.report is not None:
            self._pass_over(hook, self._rounds.report)
        else:
            self.record.scan_loss_scale(scaler)
            self._judge.judge_scaler_skip(hook, scaler)

    # Called by `Join`.

    def judge_others(self) -> None:
        """Judges a step of other ranks, for which this one has no batch."""
        try:
            if self._is_judged:
                self._rounds.begin()
                with self._isolation.measured():
                    hook = self._hooks[0] if self._hooks else None
                    self._engine.decide(StepResult(self._clock.step, [], hook=hook))
        finally:
            self._end_round()

    # Rounds.

    def _end_round(self) -> None:
        clock, engine, measurements = self._clock, self._engine, self._measurements
        self._rounds.end()
        engine.end_round()
        step, is_watched = clock.step, clock.level is not ScanLevel.OFF
        clock.advance()
        self._judge.tensors.begin_round()
        is_bad = engine.last_report is not self._last_seen
        self._last_seen = engine.last_report
        cost = measurements.timer.end_step(is_watched)
        clock.note(cost, is_bad)
        if is_watched:
            self.end_headroom(step, is_bad)
            self.record.end_step(step, cost, self.optimizers)
            measurements.emit(step)
        self._monitors.end_step(step)
        clock.begin()
        self._monitors.begin_step(clock.step)

    def end_headroom(self, step: int, is_bad: bool) -> None:
        """Ends a step's headroom, and warns of values near the end of their dtype."""
        with self._isolation.measured():
            self._measurements.headroom.end_step(step, self._judge.has_scaler, is_bad)

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Ends a step of the record after a check, in loops without optimizers."""
        try:
            yield
        finally:
            if not self._hooks:
                self.record.end_step(self._clock.step, None, [])

    @property
    def _is_judged(self) -> bool:
        """True if this rank watches the step, or another one may."""
        is_joined = self._joins_unwatched and self._engine.agreement.is_needed
        return self._clock.level is not ScanLevel.OFF or is_joined
