"""Judges the steps that optimizers and GradScalers make, and counts their rounds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ..recording.schedule import ScanLevel
from ..report.report import NonFiniteError, Report
from . import scalers
from .isolation import ErrorIsolation
from .measurements import Measurements
from .monitors.running import RunningMonitors
from .optimizer_hook import OptimizerHook
from .policy_engine import PolicyEngine
from .rounds import Rounds
from .step_clock import StepClock
from .step_judge import StepJudge
from .step_record import StepRecord
from .step_result import StepResult


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
