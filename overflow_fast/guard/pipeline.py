"""The calls for a judgement: optimizers, GradScalers, forwards, exceptions, `check()`.

1. What stands in no module's call is scanned, and all stats are sent to the host
   (`Collector`).
2. The step is begun as a unit (`Unit`).
3. The stats are received. Steps whose verdicts are late are judged first
   (`LaggedSteps`); then the unit takes its bad frames.
4. It is judged (`Judge`), as every other.
5. The call closes it: an optimizer's step is over when `after_step()` is called, a
   round when each optimizer has stepped, or one steps again.

Other units are begun elsewhere on this way: an update before it is scanned, a check and
an exception once the stats are there. A forward alone has sent its stats by itself.
Requests make and close their own units (`requests/requests.py`).

State: the optimizers whose `step` was called (one that a GradScaler skips is not among
them), the evaluation that runs, the last report when the last round ended, and whether
a rank doubts the step that was judged last. Numbers are the ledger's.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from .. import _C
from ..torch_internals.running import graph_task_id
from .collect import Collector
from .core import GuardCore
from .explaining import Explaining
from .isolation import measured
from .judge import Judge
from .kept_calls.evaluated_calls import EvaluatedCalls
from .lagged import LaggedSteps
from .ledger import Ledger
from .monitors.running import RunningMonitors
from .optimizers import scaler_hook as scalers
from .optimizers.doubts import Doubts
from .optimizers.engine_scaler import LossScaler
from .optimizers.loss_scaling import (
    SCALER,
    will_skip,
    without_expected,
    without_gradients,
)
from .optimizers.optimizer_hook import OptimizerHook
from .optimizers.updated import see_update
from .optimizers.updates import kept_step
from .raised_steps import RaisedSteps
from .report.coverage import GuardCoverage
from .report.entry_words import what_of
from .report.report import NonFiniteError, Report
from .undo.optimizer import OptimizerSnapshot
from .unit import CHECK, EVALUATION, STEP, UPDATE, Unit
from .unseen_loss import UnseenLoss
from .verdict.attribution import bad_entry
from .verdict.bad_frames import BadFrame, in_order, take_evaluated
from .watching.evaluation import Evaluation
from .watching.watch import ModelWatch

_log = logging.getLogger("overflow_fast")


class Pipeline:
    """Judges each step of a run once, and does what the policy asks for.

    Optimizers' hooks, GradScalers and the training loop call it. A judgement raises
    `NonFiniteError` if that is the action, but for one of an exception of the
    program's.

    Args:
        guard: The guard's core.
        monitors: The monitors of finite steps.

    Attributes:
        agreement: The ranks that decide together.
        collector: Collects what was seen.
        tensors: Scans what stands in no module's call.
        ledger: Has the numbers, and writes down what was judged.
        rounds: Counts steps and skips.
        judge: Judges what was collected.
        evaluation: The evaluation that runs, whose bad values are logged; None for
            none, and where they are alarms.
    """

    def __init__(self, guard: GuardCore, monitors: RunningMonitors) -> None:
        self._guard, self._monitors = guard, monitors
        self._watches, self._hooks = guard.watches, guard.hooks
        self._start, self._keeper = guard.start, guard.keeper
        self._isolation, self._clock = guard.isolation, guard.clock
        self._measurements = guard.measurements
        self.agreement = guard.agreement
        self.collector = Collector(guard)
        self.tensors = self.collector.tensors
        self._unseen_loss = UnseenLoss(self.collector)
        self.ledger = Ledger(guard)
        self.rounds = self.ledger.rounds
        self._explaining = Explaining(guard)
        self.judge = Judge(
            *(guard, self._explaining, self.ledger, self.tensors, self._may_overflow),
            lambda seen_by: self._coverage(seen_by, []),
        )
        self._lagged = LaggedSteps(guard, self.collector)
        self._doubts = Doubts(guard)
        self._is_doubted = False  # a rank doubts the step that all have judged last
        seen = self.collector, self.judge, self._explaining
        self._raised = RaisedSteps(guard, *seen)
        self.evaluation: Evaluation | None = None
        self.evaluated = EvaluatedCalls()
        if guard.keeper is not None and guard.hooks:
            for watch in guard.watches:
                watch.inputs.captures.append(self.evaluated)
                watch.on_part = self.evaluated.begin
        self._last_seen: Report | None = None  # when the last round ended
        self._called: set[OptimizerHook] = set()

    # Optimizers and GradScalers.

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
        if error is self.collector.lost:  # what its scans have seen is of this step
            self._judge_raised(error, ends=False, is_in_forward=False, hook=None)
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
        # The frames of an error hold the step.
        self._isolation.programs_error = self.collector.lost = None
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

    # Updates, forwards alone, exceptions, `check()`, and late verdicts.

    @measured
    def kept_of_doubted(
        self, hook: OptimizerHook, before: OptimizerSnapshot | None
    ) -> OptimizerSnapshot | None:
        """The way to undo a step that may overflow though its gradients are finite."""
        is_doubted, self._is_doubted = self._is_doubted, False
        if not self.agreement.is_needed:
            is_doubted = self._may_overflow(hook)
        return kept_step(hook, before) if is_doubted else None

    def _may_overflow(self, hook: OptimizerHook) -> bool:
        """True if a step may overflow that is not judged late."""
        return not self._lagged.holds(hook) and self._doubts.may_overflow(hook)

    @measured
    def skips_update(self, hook: OptimizerHook, kept: OptimizerSnapshot) -> bool:
        """Judges what a step has made of weights and state; True undoes it.

        Ranks that decide together all call it: each of them has doubted the step, or
        was told that one has.

        Raises:
            NonFiniteError: If the policy is to raise. The caller undoes it then, too.
        """
        try:
            return self._judge_update(hook, kept)
        except Exception as error:
            self._end_raised(hook, error)
            raise

    def _judge_update(self, hook: OptimizerHook, kept: OptimizerSnapshot) -> bool:
        unit = self.collector.begun(UPDATE, hook)
        try:
            try:
                if hook.optimizer is not None:
                    seen_by = self.collector, self.judge
                    see_update(unit, *seen_by, hook.optimizer, kept)
            except Exception as error:
                if not self.agreement.is_needed:
                    raise
                self._isolation.note(error)  # the other ranks wait
                unit.forget_frames()
            return self._is_skip(self.judge.judge(unit))
        finally:
            self.collector.end()

    @measured
    def judge_evaluated(self, watch: ModelWatch, batch: int) -> None:
        """Judges forwards without autograd whose stats have arrived, as on CPUs."""
        with self.evaluated.ending(watch, batch):
            self._judge_evaluated(watch, batch)

    def _judge_evaluated(self, watch: ModelWatch, batch: int) -> None:
        unit = self.collector.begun(EVALUATION)
        subject = f"Step {unit.number}, in a forward without autograd"
        frames = take_evaluated([watch], batch)
        unit.frames = self.collector.masks.left_out(frames, subject)
        if not unit.frames:
            return
        model = watch.model
        if self._start is not None and model is not None and model.training:
            self._start.hold(watch)
        if self.evaluation is not None:
            unit.policy = "warn"
            unit.notes.append(self.evaluation.text(watch.evaluated, model))
        if any(each.bad_weights for each in unit.frames):
            unit.notes += _seen_before(self.collector.watches)
        unit.call = self.evaluated.of(unit.frames[0])
        self.judge.judge(unit)

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

    @measured
    def _judge_raised(
        self,
        error: Exception,
        ends: bool,
        is_in_forward: bool,
        hook: OptimizerHook | None,
    ) -> bool:
        """See `judge_raised()`; returns True if there was something bad."""
        how = error, ends, is_in_forward, hook
        unit = self._raised.seen(*how, self.judge_late)
        if unit is None:
            return False
        try:
            self.judge.judge(unit)
        finally:
            self._raised.end()
        return True

    def forget_left(self) -> None:
        """Forgets the calls that an exception has left: the step goes on without."""
        if self._keeper is not None:
            self._keeper.drop_left()

    def check(self) -> Report | None:
        """Judges all that has run, and the state, of a step that is left out, too.

        Incurs the sync.

        Returns:
            The report of what is bad, or None.
        """
        try:
            with self._measurements.timer:
                report = self._check()
        finally:
            if not self._hooks:
                self.ledger.record_step(self._clock.step, None)
        self._end_headroom(self._clock.step, report is not None)
        return report

    def _check(self) -> Report | None:
        collector = self.collector
        collector.scan_all()
        collector.send()
        try:
            self.judge_late()
            collector.scan_failed()
            unit = collector.begun(CHECK)
            unit.frames = collector.take(unit.last_frame, with_evaluated=True)
            self._leave_out_masks(unit)
            return self.judge.judge(unit)
        finally:
            collector.end()

    def judge_late(self, is_lagged: bool = False) -> None:
        """Receives all stats, and judges the steps that were on their way.

        Those of the step at hand are received, too. Incurs the sync.

        Args:
            is_lagged: Wait only for the stats of steps before the last.
        """
        for unit in self._lagged.arrived(is_lagged):
            self.judge.judge(unit)

    def forget(self) -> None:
        """Forgets what has run and was not judged. Incurs the sync."""
        self._lagged.clear()
        self.collector.forget()

    # A step of an optimizer.

    def _judge_step(self, hook: OptimizerHook) -> bool:
        """Judges a step of an optimizer; True skips it."""
        if self.rounds.report is not None:
            return self._pass_over(hook, self.rounds.report)
        scaler = hook.scaler
        self.collector.note_scaler(scaler)
        num_agreed = self.judge.num_agreed
        try:
            return self._judge_collected(hook, scaler)
        except NonFiniteError:
            raise
        except Exception as error:
            has_begun = self.judge.num_agreed > num_agreed
            is_agreed = has_begun or not self.agreement.is_needed
            is_of_program = self._isolation.is_foreign(error)
            if has_begun or (is_of_program and is_agreed):
                raise
            if not is_of_program:
                self._isolation.note(error)
            if is_agreed:
                return False
            # The other ranks wait: it decides with them, without a finding of its own.
            is_skipped = self._skips(self.collector.begun(STEP, hook))
            if is_of_program:
                raise
            return is_skipped

    def _judge_collected(self, hook: OptimizerHook, scaler: LossScaler | None) -> bool:
        # Without a batch the gradients are those of an earlier step.
        has_batch = not self.agreement.is_shadowing
        collector, is_lagged = self.collector, self._lagged.holds(hook)
        others = [
            optimizer
            for other in self._hooks
            if other is not hook and not self.rounds.has_stepped(other)
            if (optimizer := other.optimizer) is not None
        ]
        if has_batch:
            collector.scan(hook, () if scaler else others)
        self._lagged.scan_doubted(hook)
        collector.send(is_lagged)
        unit = collector.begun(STEP, hook, scaler)
        if is_lagged:
            self._lagged.leave_to_device(unit, hook)
        try:
            self.judge_late(is_lagged)
            if is_lagged:
                return self._judge_lagged(unit, hook, has_batch)
            collector.scan_failed()
            unit.last_frame = _C.Recorder.num_frames()
            unit.frames = collector.take(unit.last_frame)
            if unit.frames and has_batch:
                self._leave_out_given_up(unit)
            self._leave_to_scaler(unit, hook, has_batch)
            return self._skips(unit)
        finally:
            collector.end(is_lagged)

    def _judge_lagged(self, unit: Unit, hook: OptimizerHook, has_batch: bool) -> bool:
        """Judges a step by what has arrived of it already, and queues the rest."""
        if self._doubts.may_overflow(hook, is_lagged=True):
            self._lagged.doubt(hook)
        found = dataclasses.replace(unit, skipped_by="")
        if not self.agreement.is_needed:  # ranks decide together, once for each step
            frames = self.collector.take(unit.last_frame)
            # What comes of a mask may be on its way.
            held = unit if self.collector.masks.are_all(frames) else found
            held.frames = frames
        self._leave_to_scaler(found, hook, has_batch)
        self._lagged.push(unit)
        if not found.frames:
            return False
        unit.is_decided = True
        return self._skips(found)

    def _skips(self, unit: Unit) -> bool:
        """Judges a step; True skips it."""
        self._is_doubted = False
        try:
            return self._is_skip(self.judge.judge(unit))
        finally:  # ranks have agreed on it, whatever has failed here since
            self._is_doubted = unit.wishes.doubts

    @staticmethod
    def _is_skip(report: Report | None) -> bool:
        return report is not None and report.action == "skip"

    def _leave_out_given_up(self, unit: Unit) -> None:
        """Leaves out a batch that the loop has given up behind its backward.

        Its backward was bad, but no gradient is, and nothing that came later: the loop
        has cleared what it had computed.
        """
        frames = unit.frames
        for watch in self.collector.watches:
            watch.note_given_up()
        is_cleared = all(e.frame.order <= e.watch.num_given_up for e in frames)
        if not (is_cleared and self.collector.wanted.gradients):
            return
        if any(each.is_backward for each in frames):
            first = self.judge.verdict_on(unit).first
            where = "" if first is None else f" (`{first.label}` of {first.place})"
            _log.info(
                "Before step %d a batch was non-finite%s, whose gradients the loop has "
                "cleared: it is no part of the step.",
                unit.number,
                where,
            )
            unit.forget_frames()

    def _leave_out_masks(self, unit: Unit) -> None:
        """Leaves out the -inf of outputs, where nothing else is bad."""
        subject = f"Step {unit.number}"
        unit.frames = self.collector.masks.left_out(unit.frames, subject)

    def _leave_to_scaler(
        self, unit: Unit, hook: OptimizerHook, has_batch: bool
    ) -> None:
        """Leaves to a GradScaler what it handles; looks further if nothing is left."""
        if unit.scaler is not None:
            unit.frames, unit.skipped_by = without_expected(
                *(unit.frames, unit.scaler),
                lambda scaler: will_skip(scaler, hook.optimizer),
            )
        self._leave_out_masks(unit)
        if not unit.frames and has_batch and not self._lagged.holds(hook):
            unit.frames = self._unseen_loss.look(unit)
        if hook.is_skipped_elsewhere:
            unit.skipped_by = "other guard"
        if not unit.frames and has_batch:
            is_scaled = unit.scaler is not None
            unit.notices = self._monitors.look(unit.number, hook.optimizer, is_scaled)

    def _judge_scaler_skip(self, hook: OptimizerHook, scaler: GradScaler) -> None:
        """Judges a step that a GradScaler has skipped.

        Inf gradients are expected under a scale, and left to the scaler; they are
        reported only once its scale has dropped to 1. Incurs a CPU-GPU sync, as the
        scaler just did.
        """
        if self.rounds.report is not None:
            self._pass_over(hook, self.rounds.report)
            return
        collector = self.collector
        collector.note_scaler(scaler)
        collector.scan(hook)
        collector.send()
        try:
            self.judge_late()
            collector.scan_failed()
            unit = collector.begun(STEP, hook)
            unit.skipped_by = SCALER
            unit.frames = collector.take(unit.last_frame)
            if scaler.get_scale() > 1:
                unit.frames = without_gradients(unit.frames)
            self._leave_out_masks(unit)
            if not unit.frames:
                unit.frames = self._unseen_loss.look(unit)
            self.judge.judge(unit)
        finally:
            collector.end()

    def _pass_over(self, hook: OptimizerHook, report: Report) -> bool:
        """Applies the verdict of a round that is bad to another of its steps."""
        is_skipped = report.action == "skip"
        self.collector.send()
        self.judge_late()
        self.collector.take(_C.Recorder.num_frames())
        if hook.optimizer is not None:
            self.collector.tensors.pass_over(hook.optimizer)
        if is_skipped:
            self.judge.restore()
        self.collector.end()
        self.rounds.note(hook, is_skipped, is_skipped)
        if report.action == "raise":
            raise NonFiniteError(report)
        return is_skipped

    @property
    def _is_judged(self) -> bool:
        """True if the step is watched."""
        return self._clock.is_watched

    # A round: it is over when each optimizer has stepped, or one steps again.

    def _end_round(self) -> None:
        clock, measurements = self._clock, self._measurements
        self.rounds.end()
        self.ledger.end_line()
        step, is_watched = clock.step, clock.is_watched
        self.tensors.begin_round()
        is_bad = self.ledger.last_report is not self._last_seen
        self._last_seen = self.ledger.last_report
        measurements.timer.end_step(is_watched)
        clock.advance()
        if is_watched:
            self._end_headroom(step, is_bad)
            self._send(step)
        self._monitors.end_step(step)
        clock.begin()
        self._monitors.begin_step(clock.step)

    def end_request(
        self, number: int, is_watched: bool, seconds: float, began: float | None
    ) -> None:
        """Ends a request, as a round of steps.

        Args:
            number: Its number.
            is_watched: False if the schedule has left it out.
            seconds: What the guard has taken in its forwards.
            began: When it began; None where that is not known.
        """
        for watch in self._watches:
            watch.frames.end_request()
        self._measurements.timer.end_step(is_watched, began, seconds)
        if is_watched and self._measurements.are_read:
            with self._isolation.isolated():
                self._send(number)

    def _send(self, number: int) -> None:
        """Sends the numbers of a step, or a request, to record and exporters."""
        self.ledger.record_step(number, self._measurements.timer.cost)
        self._measurements.emit(number, self.counts)

    def _end_headroom(self, step: int, is_bad: bool) -> None:
        """Ends a step's headroom, and warns of values near the end of their dtype."""
        has_scaler = self.collector.has_scaler
        try:
            self._measurements.headroom.end_step(step, has_scaler, is_bad)
        except Exception as error:  # the round ends all the same
            self._isolation.note(error)

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
        if self._keeper is not None:
            self._keeper.clean = None

    def counts(self) -> dict[str, float]:
        """Returns the numbers of steps and requests, and those of monitors."""
        return {
            "steps_total": self._clock.num_steps,
            **self.ledger.counts(),
            **self._monitors.metrics(),
        }

    def coverage(self) -> GuardCoverage:
        """Returns what was checked so far."""
        found = self._coverage(self._watches, self._guard.rules.unused())
        requests = self.ledger.requests
        if found.steps or not requests.are_judged:
            return found
        return found.of_requests(requests.num_requests)

    def _coverage(
        self, watches: Sequence[ModelWatch], rules_unused: list[str]
    ) -> GuardCoverage:
        return GuardCoverage.of(
            watches,
            self._clock.num_steps,
            self._measurements.timer.num_watched,
            self.tensors.without_gradient,
            self._isolation.num_failures,
            rules_unused,
            self._guard.config.ignores_spikes,
        )


def _seen_before(watches: Sequence[ModelWatch]) -> list[str]:
    """Names the gradient of an output that was bad in the step at hand, before weights.

    What the program makes of gradients itself, and writes to weights, no step shows.
    """
    waiting = [BadFrame(w, frame) for w in watches for frame in w.frames.waiting()]
    first = next(iter(in_order(waiting)), None)
    if first is None or not first.is_backward:
        return []
    what = what_of(bad_entry(first, first.bad_entries[0]))
    return [f"Before that, in the step at hand, a gradient was non-finite: {what}."]
