"""A guarded step, from its stats to the action taken.

collect   stats of what has run come from all devices; bad frames are taken
detect    the first bad value is found among them, and who made it
agree     ranks that share the models act on one report
diagnose  the step is run again and explained, and remedies are tried
decide    raise, warn or skip: `policy`, a pure function
act       what the forward has changed is put back; steps and skips are counted
report    log, evidence, flight record, warning or exception
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import TYPE_CHECKING, Literal, NamedTuple

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from .. import _C
from ..scanner.text import error_line
from ..torch_internals.running import graph_task_id
from .archive import Archive
from .config import GuardConfig
from .explaining import Explaining, gradients_of
from .isolation import ErrorIsolation, measured
from .kept_calls.call_keeper import CallKeeper
from .kept_calls.left_gradients import LeftGradients
from .measurements import Measurements
from .monitors.running import RunningMonitors, clauses_of
from .monitors.spikes import SPIKE
from .optimizers import scaler_hook as scalers
from .optimizers.engines import LossScaler
from .optimizers.loss_scaling import (
    SCALER,
    has_skipped,
    will_skip,
    without_expected,
    without_gradients,
)
from .optimizers.optimizer_hook import OptimizerHook, living
from .optimizers.rates import LearningRates
from .policy import Situation, checked_action, choose, limit_skips
from .ranks.agreement import Agreed, Agreement, Wishes
from .report.alarm_log import AlarmLog
from .report.cost import Cost
from .report.report import NonFiniteError, Report
from .step import Step, StepClock
from .undo.optimizer import OptimizerSnapshot
from .undo.restore_point import RestorePoint
from .verdict.attribution import attribute
from .verdict.bad_frames import BadFrame, take_bad, take_evaluated
from .verdict.rules import Rules
from .verdict.verdict import Verdict, is_of_flag, is_unseen
from .watching.judged_tensors import JudgedTensors, ScanLevel
from .watching.overflow_flags import OverflowFlags
from .watching.watch import ModelWatch

if TYPE_CHECKING:
    from .learning import Learning
    from .optimizers.device_flags import DeviceFlags
    from .optimizers.updates import UndoableStep
    from .report.coverage import GuardCoverage
    from .watching.evaluation import Evaluation

_CLEAN = Verdict()  # that of most steps
_HARMLESS = 4.0  # a gradient that no update makes too large for float16
_log = logging.getLogger("overflow_fast")
_SUMS = (
    "The rows of the sparse gradient `{}` that have one index were added up, as its "
    "optimizer does."
)


class _Outcome(NamedTuple):
    """The report that all ranks act on, or None; and what they wish."""

    report: Report | None
    is_own: bool
    wishes: Wishes


class _Line(NamedTuple):
    """The log's line of a finite step, which a round may yet change."""

    step: int
    action: str | None
    num_left_out: int


class Pipeline:
    """Judges each step of a run once, and does what the policy asks for.

    Optimizers' hooks, GradScalers, `Join` and the training loop call it. Every
    judgement raises `NonFiniteError` if that is the action.

    Args:
        config: The guard's.
        watches: The watched models.
        hooks: The optimizers' hooks.
        rules: The values that are allowed.
        start: The models as they were when the step began, or None.
        keeper: Keeps a step's calls for an explanation, or None.
        full_watches: Makes watches of the models that look at everything.
        agreement: The ranks that decide together.
        isolation: Isolates the guard's own errors.
        clock: The step at hand: its number, and how much of it is watched.
        overflow_flags: The overflow flags of devices.
        measurements: The guard's cost, headroom and flight record.
        monitors: The monitors of finite steps.

    Attributes:
        agreement: The same.
        keeper: The same.
        left: The gradients that the last bad step has left.
        calls_of_raised: How many calls there were when a raised step was judged last.
        rounds: Counts steps and skips.
        tensors: Scans what stands in no module's call.
        learning: Learns rules from clean steps, or None.
        last_report: The report of the last bad step, or None.
        num_bad: The number of bad steps.
        evaluation: The evaluation that runs, whose bad values are logged; None for
            none, and where they are alarms.
    """

    def __init__(
        self,
        config: GuardConfig,
        watches: Sequence[ModelWatch],
        hooks: Sequence[OptimizerHook],
        rules: Rules,
        start: RestorePoint | None,
        keeper: CallKeeper | None,
        full_watches: Callable[[], list[ModelWatch]],
        agreement: Agreement,
        isolation: ErrorIsolation,
        clock: StepClock,
        overflow_flags: OverflowFlags,
        measurements: Measurements,
        monitors: RunningMonitors,
    ) -> None:
        self._config = config
        self._may_restore = config.may_restore
        self._ignores_spikes = config.ignores_spikes
        self._watches = watches
        self._hooks = hooks
        self._rules = rules
        self._start = start
        self.agreement = agreement
        self._isolation = isolation
        self._clock = clock
        self._overflow_flags = overflow_flags
        self._measurements = measurements
        self._monitors = monitors
        self.rounds = Rounds(hooks)
        self.tensors = JudgedTensors(watches, config.weights_every)
        self._pending: deque[Step] = deque()  # lagged: their stats are on their way
        self._device_flags: DeviceFlags | None = None
        if config.sync == "lagged":
            from .optimizers.device_flags import DeviceFlags

            self._device_flags = DeviceFlags(config, watches)
            self._device_flags.request(hooks)
        self._explaining = Explaining(
            *(config, watches, keeper, full_watches),
            functools.partial(living, hooks),
        )
        self.keeper = keeper
        self.left = LeftGradients() if keeper is None else keeper.left
        self.calls_of_raised = -1  # the number of frames when one was judged
        self._archive = Archive(config, watches, measurements)
        self._alarms = AlarmLog()
        self.learning: Learning | None = None
        self.last_report: Report | None = None
        self.num_bad = 0
        self.evaluation: Evaluation | None = None
        self._num_bad_in_row = 0
        self._num_agreed = 0
        self._num_frames = _C.Recorder.num_frames()
        self._spike_step: int | None = None  # the last finite step with a spike
        self._num_spikes = 0
        self._clean_line: _Line | None = None
        self._has_scaler = self._doubts = False
        self._is_blind = False  # a tripwire had nothing to look at, which was logged
        self._last_seen: Report | None = None  # when the last round ended
        self._rates = {hook: LearningRates() for hook in hooks}
        self._called: set[OptimizerHook] = set()
        self._doubted_late: set[OptimizerHook] = set()  # with lagged verdicts

    # What calls for a judgement: optimizers, GradScalers, `Join`, forwards, `check()`.

    @measured
    def before_step(self, hook: OptimizerHook) -> bool:
        """Judges a step that an optimizer is about to make; True skips it.

        Raises:
            NonFiniteError: If the policy is to raise.
        """
        if self.rounds.has_stepped(hook):
            self._end_round()
        self.rounds.begin()
        self._called.add(hook)
        if not self._is_judged:
            self.rounds.note_unwatched(hook)
            return False
        try:
            is_skipped = self._judge_step(hook)
            hook.notify_wrapper(is_skipped)
        except Exception as error:
            self._end_raised(hook, error)
            raise
        return is_skipped

    def _end_raised(self, hook: OptimizerHook, error: Exception) -> None:
        """Ends a step that is not made: the hook does not call `after_step()` then."""
        # Of a group that has lost a rank, it is not known what the step came to.
        is_programs = error is self._isolation.programs_error
        if isinstance(error, NonFiniteError) or is_programs:
            self.after_step(hook, is_skipped=True)

    @measured
    def after_step(self, hook: OptimizerHook, is_skipped: bool) -> None:
        """Counts an optimizer's step, which was made or skipped."""
        try:
            if self._start is not None:
                self._start.end() if is_skipped else self._start.keep()
            if not (is_skipped or self._explaining.is_off):
                self._explaining.note_step(hook.optimizer)
        finally:
            if self.rounds.note_step(hook):
                self._end_round()

    def after_call(self) -> None:
        """Does what was put off until an optimizer's call has ended."""
        self._isolation.programs_error = None  # its frames hold the step
        self._isolation.end()
        if not self._watches[0].is_attached:  # else the next forward asks
            self._watches[0].is_abandoned()

    def before_scaler_step(self, optimizer: Optimizer) -> None:
        """Prepares to notice whether a scaler lets its optimizer step."""
        for hook in self._hooks:
            if hook.is_of(optimizer):
                self._called.discard(hook)
                hook.cover()

    @measured
    def after_scaler_step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Judges a step that a GradScaler has skipped."""
        for hook in self._hooks:
            if not hook.is_of(optimizer) or hook in self._called:
                continue
            if self.rounds.has_stepped(hook):
                self._end_round()
            self.rounds.begin()
            try:
                if self._is_judged:
                    self._judge_scaler_skip(hook, scaler)
            finally:
                self.after_step(hook, is_skipped=self.rounds.is_skipped)

    @measured
    def judge_others(self) -> None:
        """Judges a step of other ranks, for which this one has no batch."""
        try:
            if self._is_judged:
                self.rounds.begin()
                hook = self._hooks[0] if self._hooks else None
                self._decide(Step(self._clock.step, hook))
                if self._doubts:
                    self._judge_update(hook, lambda: False)
        finally:
            self._end_round()

    @measured
    def judge_evaluated(self, watch: ModelWatch, batch: int) -> None:
        """Judges a forward without autograd: at once on the CPU, else lagged."""
        frames = take_evaluated([watch], batch)
        if not frames:
            return
        model = watch.model
        if self._start is not None and model is not None and model.training:
            self._start.hold(watch)
        step = self._new_step(moment="evaluation")
        step.frames = frames
        if self.evaluation is not None:
            step.policy = "warn"
            step.notes.append(self.evaluation.text(watch.evaluated, model))
        self._decide(step)

    def judge_raised(
        self,
        error: Exception,
        ends: bool,
        is_in_forward: bool = False,
        hook: OptimizerHook | None = None,
    ) -> None:
        """Judges a step in which the program's own code has raised.

        Where a bad value was seen before, the report is added to the exception, which
        stays the program's: nothing is raised here. Else nothing is said. Incurs the
        sync.

        Not within a backward, whose exceptions are torch's: it leaves a forward that it
        computes again when it has what it needs. Those that end it come again.

        Args:
            error: The exception.
            ends: Whether the run ends with it.
            is_in_forward: Whether it was raised within a forward of a model alone.
            hook: That of the optimizer whose step, or closure, has raised, or None.
        """
        if hook is None and graph_task_id() >= 0:
            return
        how = ends, is_in_forward, hook
        is_own = isinstance(error, NonFiniteError) or self._isolation.is_foreign(error)
        if is_own or not (self._is_judged and self._judge_raised(error, *how)):
            self.forget_left()

    def step_raised(self, hook: OptimizerHook, error: Exception) -> None:
        """Judges a step whose optimizer, or closure, has raised."""
        self.judge_raised(error, ends=False, hook=hook)

    def kept_of_doubted(
        self, hook: OptimizerHook, before: OptimizerSnapshot | None
    ) -> UndoableStep | None:
        """The way to undo a step that may overflow though its gradients are finite."""
        doubts, self._doubts = self._doubts, False
        if not self.agreement.is_needed:
            doubts = not self._is_lagged(hook) and self._may_overflow(hook)
        if not doubts:
            return None
        from .optimizers.updates import kept_step

        return kept_step(hook, before)

    def _may_overflow(self, hook: OptimizerHook | None) -> bool:
        """True if a step may overflow although its gradients are finite."""
        largest = max(watch.recorder.largest_gradient for watch in self._watches)
        optimizer = None if hook is None else hook.optimizer
        if hook is None or optimizer is None or self._clock.level is ScanLevel.OFF:
            return False
        rate = self._rates[hook].largest(self._is_lagged(hook))
        if largest <= _HARMLESS and rate <= 1.0:
            return False
        with self._isolation.isolated():
            from .optimizers.updates import may_overflow

            return may_overflow(optimizer, largest, rate)
        return False

    @measured
    def skips_update(self, hook: OptimizerHook, was_finite: Callable[[], bool]) -> bool:
        """Judges what a step has made of weights and state; True undoes it.

        Raises:
            NonFiniteError: If the policy is to raise. The caller undoes it then, too.
        """
        try:
            return self._judge_update(hook, was_finite)
        except Exception as error:
            self._end_raised(hook, error)
            raise

    def _judge_update(
        self, hook: OptimizerHook | None, was_finite: Callable[[], bool]
    ) -> bool:
        from .optimizers.updates import judge_update

        return judge_update(self, hook, was_finite)

    @measured
    def _judge_raised(
        self,
        error: Exception,
        ends: bool,
        is_in_forward: bool,
        hook: OptimizerHook | None,
    ) -> bool:
        """See `judge_raised()`; returns True if there was something bad."""
        from .raised import judge_raised

        return judge_raised(self, error, ends, is_in_forward, hook)

    def forget_left(self) -> None:
        """Forgets the calls that an exception has left: the step goes on without."""
        if self.keeper is not None:
            self.keeper.drop_left()

    def check(self) -> Report | None:
        """Judges all that has run, and the state, whatever the step's level is.

        Incurs the sync.

        Returns:
            The report of what is bad, or None.
        """
        try:
            with self._measurements.timer:
                report = self._check()
        finally:
            if not self._hooks:
                self._record_step(self._clock.step, None)
        self._end_headroom(self._clock.step, report is not None)
        return report

    def judge_late(self, is_lagged: bool = False) -> None:
        """Judges the steps that are still on their way. Incurs the sync.

        Args:
            is_lagged: Wait only for steps before the last.
        """
        for watch in self._watches:
            watch.frames.receive(is_lagged)
        while self._pending:
            step = self._pending.popleft()
            frames = take_bad(self._watches, step.last_frame)
            frames, skipped_by = without_expected(frames, step.scaler, has_skipped)
            if not frames and step.is_decided:
                continue
            if frames:
                skipped_by = skipped_by or step.skipped_by
            late = Step(step.number, step.hook, moment="after", skipped_by=skipped_by)
            late.frames, late.left_out = frames, step.left_out
            self._decide(late)

    def forget(self) -> None:
        """Forgets what has run and was not judged. Incurs the sync."""
        self._pending.clear()
        for watch in self._watches:
            watch.frames.receive(is_lagged=False)
        take_bad(self._watches, _C.Recorder.num_frames())
        take_evaluated(self._watches)
        self._end_judgement()

    # Collect: the stats of a step come from all devices, and its bad frames are taken.

    def _judge_step(self, hook: OptimizerHook) -> bool:
        """Judges a step of an optimizer; True skips it."""
        if self.rounds.report is not None:
            return self._pass_over(hook, self.rounds.report)
        scaler = hook.scaler
        self._note_scaler(scaler)
        num_agreed = self._num_agreed
        try:
            return self._collect(hook, scaler)
        except NonFiniteError:
            raise
        except Exception as error:
            is_agreed = self._num_agreed > num_agreed or not self.agreement.is_needed
            is_of_program = self._isolation.is_foreign(error)
            if self._num_agreed > num_agreed or (is_of_program and is_agreed):
                raise
            if not is_of_program:
                self._isolation.note(error)
            if is_agreed:
                return False
            # The other ranks wait: it decides with them, without a finding of its own.
            step = Step(self._clock.step, hook, can_restore=True)
            is_skipped = self._is_skip(self._decide(step))
            if is_of_program:
                raise
            return is_skipped

    def _collect(self, hook: OptimizerHook, scaler: LossScaler | None) -> bool:
        # Without a batch the gradients are those of an earlier step.
        shadows = self.agreement.is_shadowing
        level = ScanLevel.OFF if shadows else self._clock.level
        others = [
            optimizer
            for other in self._hooks
            if other is not hook and not self.rounds.has_stepped(other)
            if (optimizer := other.optimizer) is not None
        ]
        self._scan(hook, level, () if scaler else others)
        self._overflow_flags.ask(level, scaler)
        if hook in self._doubted_late and hook.optimizer is not None:
            self._doubted_late.remove(hook)
            self.tensors.scan_update(hook.optimizer)  # what its last step has made
        flags, is_lagged = self._device_flags, self._is_lagged(hook)
        self._rates[hook].note(hook.optimizer)
        self._send_stats(is_lagged)
        if flags is not None and self._is_learning:
            flags.drop()
        step = self._new_step(hook, scaler)
        if flags is not None and is_lagged:
            start = self._start if self._may_restore else None
            if flags.skip(hook, scaler is not None, start):
                step.skipped_by = "optimizer's kernel"
        try:
            self.judge_late(is_lagged)
            if is_lagged and self._may_overflow(hook):
                self._doubted_late.add(hook)
            elif not is_lagged:
                step.notes += self._scan_rest()
                step.last_frame = _C.Recorder.num_frames()
            # Ranks decide together, once for each step.
            waits = is_lagged and self.agreement.is_needed
            found = dataclasses.replace(step, skipped_by="") if is_lagged else step
            if not waits:
                found.frames = take_bad(self._watches, step.last_frame)
            if found.frames and level is not ScanLevel.OFF and not is_lagged:
                self._leave_out_given_up(found)
            self._leave_to_scaler(found, hook, level)
            if is_lagged:
                self._pending.append(step)
                if not found.frames:
                    return False
            step.is_decided = True
            return self._is_skip(self._decide(found))
        finally:
            self._end_judgement(is_lagged)

    def _leave_out_given_up(self, step: Step) -> None:
        """Leaves out a batch that the loop has given up behind its backward.

        Its backward was bad, but no gradient is, and nothing that came later: the loop
        has cleared what it had computed.
        """
        frames = step.frames
        is_cleared = all(e.frame.order <= e.watch.num_given_up for e in frames)
        if not (is_cleared and self._config.wanted.gradients):
            return
        if any(each.is_backward for each in frames):
            first = self._verdict_on(step).first
            where = "" if first is None else f" (`{first.label}` of {first.place})"
            _log.info(
                "Before step %d a batch was non-finite%s, whose gradients the loop has "
                "cleared: it is no part of the step.",
                step.number,
                where,
            )
            step.frames = []

    def _is_lagged(self, hook: OptimizerHook) -> bool:
        """True if an optimizer's step is made before its verdict is there."""
        flags = self._device_flags
        return flags is not None and flags.are_lagged(hook, self._is_learning)

    def _leave_to_scaler(
        self, step: Step, hook: OptimizerHook, level: ScanLevel
    ) -> None:
        """Leaves to a GradScaler what it handles; asks monitors if nothing is left."""
        step.is_whole = _is_whole(step.frames, level)
        if step.scaler is not None:
            step.frames, step.skipped_by = without_expected(
                *(step.frames, step.scaler),
                lambda scaler: will_skip(scaler, hook.optimizer),
            )
        if hook.is_skipped_elsewhere:
            step.skipped_by = "other guard"
        if not step.frames and level is not ScanLevel.OFF:
            is_scaled, is_all = step.scaler is not None, level is ScanLevel.ALL
            step.notices = self._monitors.look(
                step.number, hook.optimizer, is_scaled, is_all
            )

    def _judge_scaler_skip(self, hook: OptimizerHook, scaler: GradScaler) -> None:
        """Judges a step that a GradScaler has skipped.

        Inf gradients are expected under a scale, and left to the scaler; they are
        reported only once its scale has dropped to 1. Incurs a CPU-GPU sync, as the
        scaler just did.
        """
        if self.rounds.report is not None:
            self._pass_over(hook, self.rounds.report)
            return
        self._note_scaler(scaler)
        self._scan(hook, self._clock.level)
        self._send_stats()
        try:
            self.judge_late()
            self._scan_rest()
            step = self._new_step(hook)
            step.skipped_by = SCALER
            step.frames = take_bad(self._watches, step.last_frame)
            if scaler.get_scale() > 1:
                step.frames = without_gradients(step.frames)
            self._decide(step)
        finally:
            self._end_judgement()

    def _pass_over(self, hook: OptimizerHook, report: Report) -> bool:
        """Applies the verdict of a round that is bad to another of its steps."""
        is_skipped = report.action == "skip"
        self._send_stats()
        self.judge_late()
        take_bad(self._watches, _C.Recorder.num_frames())
        if is_skipped:
            self._restore()
        self._end_judgement()
        self.rounds.note(hook, is_skipped, is_skipped)
        if report.action == "raise":
            raise NonFiniteError(report)
        return is_skipped

    def _check(self) -> Report | None:
        level = self._clock.level
        self.tensors.begin_round()
        self.tensors.scan(None, ScanLevel.ALL)
        self._overflow_flags.ask(level)
        self._send_stats()
        try:
            self.judge_late()
            notes = self._scan_rest()
            step = self._new_step(moment="check")
            step.notes += notes
            step.frames = take_bad(self._watches, step.last_frame)
            step.frames += take_evaluated(self._watches)
            step.is_whole = _is_whole(step.frames, level)
            return self._decide(step)
        finally:
            self._end_judgement()

    def _scan(
        self, hook: OptimizerHook, level: ScanLevel, others: Sequence[Optimizer] = ()
    ) -> None:
        """Scans what belongs to no call. Does not incur a CPU-GPU sync."""
        engine = hook.all_layers if hook.is_of_engine else ()
        self.tensors.scan(hook.optimizer, level, others, engine)
        is_blind = not (self.tensors.num_gradients or self._has_loss())
        if is_blind and self._config.is_tripwire and level is not ScanLevel.OFF:
            self._warn_blind()

    def _scan_rest(self) -> list[str]:
        """Scans what depends on the stats that have arrived.

        That is in another way what could not be scanned, and the sums of sparse
        gradients.

        Returns:
            A sentence for each of these.

        Raises:
            Exception: A device's own error, which this wait has met for the program.
        """
        lost: list[Exception] = []
        for watch in self._watches:
            try:
                watch.recorder.raise_lost()
            except Exception as error:
                lost.append(error)
            watch.recorder.scan_failed(self.tensors.find)
        if lost:
            self._isolation.programs_error = lost[0]
            raise lost[0]
        names = self.tensors.scan_sums()
        if names:
            self._send_stats()
            for watch in self._watches:
                watch.frames.receive(is_lagged=False)
        return [_SUMS.format(name) for name in names]

    def _send_stats(self, is_lagged: bool = False) -> None:
        """Starts the copy of all stats to the host; does not wait."""
        for watch in self._watches:
            watch.frames.send(with_captured=not is_lagged)

    def _warn_blind(self) -> None:
        """Logs, once, that a step had nothing that a tripwire looks at."""
        if self._is_blind:
            return
        self._is_blind = True
        _log.warning(
            "Step %d was not checked: watch='tripwire' saw neither a loss nor a "
            "gradient in it. Return the loss from the model or give "
            "guard.record(loss=loss), or leave watch at its default. Later steps of "
            "this kind are not logged.",
            self._clock.step,
        )

    def _has_loss(self) -> bool:
        return any(watch.has_loss_of_step for watch in self._watches)

    def _note_scaler(self, scaler: LossScaler | None) -> None:
        """Adds a scaler's scale to the step's record. Does not incur a sync."""
        if scaler is None:
            return
        self._has_scaler = True
        if self._measurements.record is not None:
            with self._isolation.isolated():
                self._measurements.record.scan_loss_scale(scaler)

    def _new_step(
        self,
        hook: OptimizerHook | None = None,
        scaler: LossScaler | None = None,
        moment: Literal["before", "check", "evaluation", "raised"] = "before",
    ) -> Step:
        clock, can_restore = self._clock, moment != "check"
        return Step(clock.step, hook, scaler, clock.left_out, moment, can_restore)

    def _end_judgement(self, is_lagged: bool = False) -> None:
        self.tensors.forget()
        for watch in self._watches:
            watch.end_judgement(is_lagged)

    # A step from its bad frames on.

    def _decide(self, step: Step) -> Report | None:
        """Decides on a step, and reports it if it is bad.

        Returns:
            The report if the step is bad or skipped, None if it goes on.

        Raises:
            NonFiniteError: If the policy is to raise, or too many steps in a row have
                been skipped.
        """
        self._leave_out_learned(step)
        if step.moment != "evaluation" and self.agreement.is_needed:
            outcome = self._decide_together(step)
        else:
            outcome = self._decide_alone(step)
        report = outcome.report
        if report is None:
            return self._end_finite(step, outcome)
        self._count(step, report)
        if report.action != "warn" and step.can_restore:
            report.notes += self._restore()
        self._publish(step, report, outcome.is_own)
        return report

    # Detect: the first bad value, and who made it.

    @property
    def _is_learning(self) -> bool:
        """True while rules are learned: bad values may turn out to be expected."""
        return self.learning is not None and not self.learning.is_over

    def _leave_out_learned(self, step: Step) -> None:
        if self.learning is not None:
            is_skipped = bool(step.skipped_by) and step.moment != "evaluation"
            step.frames = self.learning.without_expected(
                step.frames, step.is_whole, is_skipped
            )

    def _wishes(self, step: Step) -> Wishes:
        """The wishes of this rank, and what it has seen in a step."""
        kinds = [each.kind for each in step.notices]
        wants_skip = any(each.action == "skip" for each in step.notices)
        hook, doubts = step.hook, False
        if self.agreement.is_needed and hook is not None and step.moment == "before":
            doubts = not self._is_lagged(hook) and self._may_overflow(hook)
        return Wishes(SPIKE in kinds, wants_skip, doubts)

    def _detect(self, step: Step) -> Verdict:
        if step.verdict is None:
            step.verdict = self._verdict_on(step) if step.frames else _CLEAN
        return step.verdict

    def _verdict_on(self, step: Step) -> Verdict:
        watches = step.watches or self._watches
        verdict = attribute(step.frames, watches, step.moment == "check")
        if verdict.origin.source not in ("weight", "optimizer_state"):
            return verdict
        had_finite = all(w.wanted.gradients for w in watches)
        with self._isolation.isolated():
            from .verdict.optimizer_settings import bad_settings

            settings = bad_settings(
                living(self._hooks), had_finite and not self._num_bad_in_row
            )
            verdict = verdict.with_remarks([*verdict.origin.remarks, *settings])
        return verdict

    # Agree and diagnose: alone, or with the ranks that share the models.

    def _decide_alone(self, step: Step) -> _Outcome:
        wishes = self._wishes(step)
        if not step.frames:
            return _Outcome(None, True, wishes)
        step = self._seen_in_full(step)
        report = self._make_report(step, self._detect(step))
        if not (self._explaining.is_off or is_unseen(report.verdict)):
            ends, verdict = report.action == "raise", report.verdict
            with self._left_out():
                report.explanation = self._explaining.explain(step, verdict, ends)
        return _Outcome(self._choose_action(step, report), True, wishes)

    def _seen_in_full(self, step: Step) -> Step:
        """Looks again at a step that a tripwire has found bad."""
        if not (self._explaining.looks_again and _can_be_found(self._detect(step))):
            return step
        with self._left_out():
            return self._explaining.look_again(step)

    def _decide_together(self, step: Step) -> _Outcome:
        """Agrees with the other ranks, and replays the step with them.

        A callable is asked once it is explained. Any other policy is followed before,
        so that all ranks know what to do if one is lost in the replay.
        """
        self._num_agreed += 1
        begin, self._num_frames = self._num_frames, _C.Recorder.num_frames()
        agreed = self._agree(step, begin)
        is_broken = False
        first = agreed.report.verdict if agreed.report is not None else None
        looks = first is not None and _can_be_found(first)
        if self._explaining.looks_again and looks:
            step, agreed, is_broken = self._look_together(step, agreed)
        report, is_own, wishes = agreed.report, agreed.is_own, agreed.wishes
        self._doubts = wishes.doubts
        if report is None:
            return _Outcome(None, is_own, wishes)
        if not (is_broken or is_unseen(report.verdict)):
            with self._left_out():
                report.explanation, is_broken = self._explaining.explain_together(
                    agreed, step.moment
                )
        if is_broken:  # it may yet be in a collective that the next step would meet
            report.action = "raise"
        elif callable(self._config.on_overflow):
            own = report
            report = self.agreement.act_on(
                is_own, lambda: self._choose_action(step, own)
            )
        return _Outcome(report, is_own, wishes)

    def _agree(self, step: Step, begin: int) -> Agreed:
        """Agrees on the report of the rank that found the first bad value.

        Args:
            step: This rank's step.
            begin: The number of frames before the step, or its replay.
        """
        verdict = self._detect(step)
        ends = self._config.on_overflow == "raise"
        first = min((bad.frame.order for bad in step.frames), default=begin)
        is_asked = callable(self._config.on_overflow)

        def make() -> Report:
            report = self._make_report(step, verdict)
            return report if is_asked else self._choose_action(step, report)

        return self.agreement.agree(
            *(step.number, verdict, max(0, first - begin), make),
            lambda: self._explaining.offer(step, verdict, ends, self.agreement.joins),
            self._wishes(step),
        )

    def _look_together(self, step: Step, agreed: Agreed) -> tuple[Step, Agreed, bool]:
        """Looks at a step again with the other ranks, and agrees on what they saw."""
        assert agreed.report is not None
        frames = _C.Recorder.num_frames()
        with self._left_out():
            seen, note, is_broken = self._explaining.look_together(step, agreed)
        if note:
            agreed.report.notes.append(note)
            return step, agreed, is_broken
        again = self._agree(seen, frames)
        if again.report is None:
            agreed.report.notes.append(self._explaining.finite_note())
            return step, agreed, False
        return seen, again, False

    @contextlib.contextmanager
    def _left_out(self) -> Iterator[None]:
        """Leaves the time within out of the guard's own: steps that are run again."""
        begin = perf_counter()
        try:
            yield
        finally:
            self._measurements.timer.leave_out(perf_counter() - begin)

    def _make_report(self, step: Step, verdict: Verdict) -> Report:
        """Makes the report of a bad step; without details where these fail."""
        try:
            from .reporting import report_of

            return report_of(self, step, verdict)
        except Exception as error:  # the verdict stands, and other ranks wait for it
            self._isolation.note(error)
            policy = self._config.on_overflow
            action = policy if isinstance(policy, str) else "warn"
            note = f"The guard failed to add details ({type(error).__name__}: {error})."
            return Report(step.number, action, verdict, notes=[note])

    # Decide: raise, warn or skip.

    def _choose_action(self, step: Step, report: Report) -> Report:
        """Chooses the action; calls the policy if it is the user's callable."""
        policy = step.policy or self._config.on_overflow
        if callable(policy):
            try:
                report.action = self._ask(policy, report)
            except Exception:
                self._end_unanswered(step, report)
                raise
        is_lost = self._is_beyond_repair(step, report.verdict)
        situation = Situation(
            can_skip=step.hook is not None
            and step.moment == "before"
            and not step.skipped_by,
            is_skipped=bool(step.skipped_by),
            is_undone=step.hook is not None and step.hook.has_snapshot,
            is_apart=report.action == "skip" and self.agreement.is_apart,
            is_beyond_repair=is_lost,
        )
        choice = choose(report.action, situation)
        report.action = choice.action
        report.notes += choice.notes
        is_put_back = situation.is_undone and choice.action != "warn"
        report.is_beyond_repair = is_lost and not is_put_back
        # Set last: a callable receives a report without what it has yet to decide.
        report.moment, report.skipped_by = step.moment, step.skipped_by
        return report

    def _end_unanswered(self, step: Step, report: Report) -> None:
        """Ends a bad step whose policy has raised, which leaves it instead."""
        report.action, report.moment = "raise", step.moment
        report.skipped_by = step.skipped_by
        report.is_beyond_repair = self._is_beyond_repair(step, report.verdict)
        self._count(step, report)
        if step.can_restore:
            report.notes += self._restore()
        self._clean_line = None
        with self._isolation.isolated():
            self._archive.end_report(report, step.number, step.left_out.total, True)

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
        """Keeps what other code than a forward writes to the models from `_restore`."""
        if self._start is None or not self._may_restore:
            return contextlib.nullcontext()
        from .undo.lending import lent

        return lent(self._start.starts)

    def _is_beyond_repair(self, step: Step, verdict: Verdict) -> bool:
        """Returns True if the value was bad before the step, and stays bad."""
        with self._isolation.isolated():
            from .verdict.repair import is_beyond_repair

            start = self._start if step.can_restore and self._may_restore else None
            return is_beyond_repair(verdict, self._watches, start)
        return False

    # Act: put back what the forward has changed; count steps and skips.

    def _restore(self) -> list[str]:
        """Puts back what the forward changed; returns sentences about failures."""
        if self._start is None or not self._may_restore:
            return []
        try:
            return self._start.restore()
        except Exception as error:  # the action is decided
            self._isolation.note(error)
            return [f"What the forward changed was not put back ({error_line(error)})."]

    def _count(self, step: Step, report: Report) -> None:
        """Counts a bad step and its action; too many skips in a row raise."""
        self.num_bad += 1
        self._num_bad_in_row += 1
        self.last_report = report
        if step.moment not in ("after", "evaluation"):  # gradients are the step's
            gradients = gradients_of(self._watches, self._detect(step).dirty_gradients)
            since = {} if self.keeper is None else self.keeper.left_over
            self.left.note(step.number, gradients, since)
        if step.hook is not None:
            if report.action == "skip":
                self._count_skip(step.hook, report)
            else:
                self.rounds.note(step.hook, bool(step.skipped_by), is_by_guard=False)
            if step.moment != "after":
                self.rounds.report = report
        report.num_skipped = self.rounds.num_skipped

    def _count_skip(self, hook: OptimizerHook, report: Report) -> None:
        """Counts a step that is skipped; after too many in a row it raises instead."""
        rounds, most = self.rounds, self._config.max_consecutive_skips
        rounds.note(hook, is_skipped=True, is_by_guard=True)
        choice = limit_skips(rounds.consecutive_skips, most)
        if choice.action != "skip":
            rounds.take_back()
        report.action = choice.action
        report.notes += choice.notes

    def _end_finite(self, step: Step, outcome: _Outcome) -> Report | None:
        """Ends a finite step; skips it if a monitor asks for that."""
        if not (outcome.wishes.has_spike or outcome.wishes.wants_skip or step.notices):
            self._end_clean(step)
            return None
        if outcome.wishes.has_spike:
            self._num_spikes += self._spike_step != step.number
            self._spike_step = step.number
        hook = step.hook
        can_skip = step.moment == "before" and step.can_restore and not step.skipped_by
        can_skip = can_skip and not self.agreement.is_apart
        is_skipped = outcome.wishes.wants_skip and can_skip and hook is not None
        notes = self._restore() if is_skipped else []
        clauses = clauses_of(step.notices, outcome.wishes.has_spike, is_skipped)
        if clauses:
            from .report.notice import notices_text

            text = notices_text(step.number, clauses, is_skipped, notes)
            _log.warning("%s", text)
        self._archive.log_notices(step.number, step.notices, is_skipped)
        self._end_clean(step)
        if not is_skipped or hook is None:
            return None
        self._num_bad_in_row = 0
        report = Report(step.number, "skip", _CLEAN, notes=notes, moment="before")
        self._count_skip(hook, report)
        num_left_out = step.left_out.total
        self._clean_line = _Line(step.number, report.action, num_left_out)
        self.rounds.report = report
        if report.action == "raise":
            raise NonFiniteError(report)
        return report

    def _end_clean(self, step: Step) -> None:
        if self.learning is not None and step.moment != "evaluation":
            is_check = step.moment == "check"
            is_clean = step.is_whole and not step.skipped_by
            self.learning.end_step(is_clean, None if is_check else step.number)
        skipper, num_left_out = step.skipped_by or None, step.left_out.total
        line = _Line(step.number, skipper, num_left_out)
        if step.hook is None or step.moment == "after":
            self._num_bad_in_row = 0
            self._log_line(line)
        else:  # a round has one line
            before = self._clean_line
            if before is not None and not skipper:
                line = line._replace(action=before.action)
            self._clean_line = line
        if step.hook is not None:
            is_over = step.moment == "after"
            self.rounds.note(step.hook, bool(skipper), False, is_over)

    # Report: to disk, log and the training loop.

    def _publish(self, step: Step, report: Report, is_own: bool) -> None:
        """Writes the report to disk and log, and raises it where that is the action."""
        self._clean_line = None
        with self._isolation.isolated():  # the action is decided
            self._archive.end_report(report, step.number, step.left_out.total, is_own)
        if report.action == "raise":
            raise NonFiniteError(report)
        if is_own:
            with self._isolation.isolated():
                self._alarms.warn(report, self._num_bad_in_row)

    def _log_line(self, line: _Line) -> None:
        self._clean_line, num_skipped = None, self.rounds.num_skipped
        left_out = num_skipped, line.num_left_out
        self._archive.log(line.step, _CLEAN, line.action, *left_out, None)

    # A round: it is over when each optimizer has stepped, or one steps again.

    def _end_round(self) -> None:
        clock, measurements = self._clock, self._measurements
        self.rounds.end()
        self._end_log_line()
        step, is_watched = clock.step, clock.level is not ScanLevel.OFF
        self.tensors.begin_round()
        is_bad = self.last_report is not self._last_seen
        self._last_seen = self.last_report
        cost = measurements.timer.end_step(is_watched)
        clock.advance(cost, is_bad)
        if is_watched:
            self._end_headroom(step, is_bad)
            self._record_step(step, cost)
            measurements.emit(step, self.counts)
        self._monitors.end_step(step)
        clock.begin()
        self._monitors.begin_step(clock.step)

    def _end_log_line(self) -> None:
        if self.rounds.report is None:
            self._num_bad_in_row = 0
        if self._clean_line is not None:
            self._log_line(self._clean_line)

    def _end_headroom(self, step: int, is_bad: bool) -> None:
        """Ends a step's headroom, and warns of values near the end of their dtype."""
        try:
            self._measurements.headroom.end_step(step, self._has_scaler, is_bad)
        except Exception as error:  # the round ends all the same
            self._isolation.note(error)

    def _record_step(self, step: int, cost: Cost | None) -> None:
        """Ends the flight record's line; its cost is None where it was not measured."""
        record = self._measurements.record
        if record is None:
            return
        optimizers, has_spike = living(self._hooks), self._spike_step == step
        report, is_skipped = self.last_report, self.rounds.is_skipped
        try:
            record.end_step(step, cost, optimizers, report, is_skipped, has_spike)
        except Exception as error:
            self._isolation.note(error)

    @property
    def _is_judged(self) -> bool:
        """True if this rank watches the step, or another one may."""
        may_differ = self._config.schedule.budget is not None
        is_joined = may_differ and self.agreement.is_needed
        return self._clock.level is not ScanLevel.OFF or is_joined

    @staticmethod
    def _is_skip(report: Report | None) -> bool:
        return report is not None and report.action == "skip"

    # On, off, and what users read.

    def attach(self) -> None:
        """Hooks the optimizers, and GradScalers."""
        for hook in self._hooks:
            hook.attach(self)
        scalers.listen(self)
        self._monitors.begin_step(self._clock.step)

    def detach(self) -> None:
        """Removes the hooks."""
        scalers.stop_listening(self)
        for hook in self._hooks:
            hook.detach()
        self._monitors.stop()
        if self.keeper is not None:
            self.keeper.clean = None

    def close(self) -> None:
        """Writes what is known of the last step, and closes log and record."""
        self._end_log_line()
        self._archive.close()
        if self._measurements.record is not None:
            with self._isolation.isolated():
                self._measurements.record.close(self.last_report)

    def counts(self) -> dict[str, float]:
        """Returns the numbers of steps, and those of monitors."""
        return {
            "steps_total": self._clock.num_steps,
            "bad_steps_total": self.num_bad,
            "skipped_steps_total": self.rounds.num_skipped,
            "spikes_total": self._num_spikes,
            "consecutive_skips": self.rounds.consecutive_skips,
            **self._monitors.metrics(),
        }

    def coverage(self) -> GuardCoverage:
        """Returns what was checked so far."""
        return self._coverage(self._watches, self._rules.unused())

    def _coverage(
        self, watches: Sequence[ModelWatch], rules_unused: list[str]
    ) -> GuardCoverage:
        from .report.coverage import GuardCoverage

        return GuardCoverage.of(
            watches,
            self._clock.num_steps,
            self._measurements.timer.num_watched,
            self.tensors.without_gradient,
            self._isolation.num_failures,
            rules_unused,
            self._ignores_spikes,
        )


def _can_be_found(verdict: Verdict) -> bool:
    """True if a bad tensor was seen, which may be met again."""
    return not (is_of_flag(verdict) or is_unseen(verdict))


def _is_whole(frames: Sequence[BadFrame], level: ScanLevel) -> bool:
    return level is ScanLevel.ALL and not any(bad.is_gradient for bad in frames)


# A round of steps: one of each optimizer.


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

    def __init__(self, hooks: Sequence[OptimizerHook]) -> None:
        self._hooks = hooks
        self._stepped: set[OptimizerHook] = set()
        self._skips_in_row = dict.fromkeys(hooks, 0)
        self._was_skipped = dict.fromkeys(hooks, False)
        self._made: set[OptimizerHook] = set()  # unless the guard skips them yet
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
        for hook in list(self._made):
            self._end_row(hook)
        self._stepped.clear()
        self._is_over = True

    def note_step(self, hook: OptimizerHook) -> bool:
        """Notes the end of an optimizer's step; returns True if it ends the round."""
        if hook in self._made:
            self._end_row(hook)
        self._stepped.add(hook)
        return len(self._stepped) == len(self._hooks)

    def note(
        self,
        hook: OptimizerHook,
        is_skipped: bool,
        is_by_guard: bool,
        is_over: bool = False,
    ) -> None:
        """Notes whether an optimizer's step is skipped.

        The guard may yet skip one that it has let pass: for a monitor, or its update.

        Args:
            hook: The optimizer's.
            is_skipped: It is skipped, by the guard or by other code.
            is_by_guard: The guard skips it.
            is_over: It was made before it was judged.
        """
        self._was_skipped[hook] = is_skipped
        self.is_skipped |= is_skipped
        if is_by_guard:
            self._made.discard(hook)
            self._skips_in_row[hook] += 1
        elif is_over:
            self._end_row(hook)
        else:
            self._made.add(hook)
        if is_by_guard and not self._is_counted:
            self._is_counted = True
            self.num_skipped += 1

    def _end_row(self, hook: OptimizerHook) -> None:
        """Ends a row of skips: a step was not skipped by the guard."""
        self._made.discard(hook)
        self._skips_in_row[hook] = 0

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
