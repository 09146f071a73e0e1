"""Runs a guard: hooks on and off, steps counted, each judged when it is due."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from .. import _C
from ..core.tensors import loss_in
from ..distributed.joinable import GuardJoinable
from ..recording.loop_batches import LoopBatch
from ..recording.schedule import ScanLevel, WatchSchedule
from ..recording.watch import ModelWatch
from ..report.guard_coverage import GuardCoverage
from ..report.report import NonFiniteError, Report
from ..selftest.fault_results import SelfTestResult
from ..selftest.self_test import Loss, SelfTest
from ..verdict.headroom import HeadroomTracker
from ..verdict.rules import Rules
from . import scalers
from .config import GuardConfig, make_watches
from .isolation import ErrorIsolation
from .learning import Learning
from .metrics import MetricsDispatcher, exporters_of
from .optimizer_hook import OptimizerHook
from .overhead import OverheadTimer
from .policy_engine import PolicyEngine
from .rounds import Rounds
from .step_judge import StepJudge
from .step_result import StepResult


class GuardLoop:
    """What the hooks of models, optimizers and scalers call; they hold it.

    A step is a round of all optimizers: it is over when each has stepped, or when one
    of them is about to step again.

    Args:
        options: The guard's.
        models: The models, by the prefix of their modules' names.
        optimizers: The optimizers.
        defer: Whether to treat the CPU as a device.
    """

    def __init__(
        self,
        options: GuardConfig,
        models: Mapping[str, nn.Module],
        optimizers: Sequence[Optimizer],
        defer: bool,
    ) -> None:
        self.options = options
        self.rules = Rules(options.allow)
        self.watches = make_watches(
            models, options, self.rules, self._on_evaluated, defer
        )
        self.defer = defer
        self._gates = [
            OptimizerHook(
                each,
                self._before_step,
                self._after_step,
                may_call_off=options.on_overflow != "warn",
            )
            for each in optimizers
        ]
        self.rounds = Rounds(self._gates)
        self.meter = OverheadTimer(
            lambda: sum(w.recorder.seconds for w in self.watches)
        )
        self.decision = PolicyEngine(
            options,
            self.watches,
            self.rounds,
            lambda: self.meter.cost,
            lambda: self.coverage().gaps(),
        )
        self.isolation = ErrorIsolation(self.meter, self.decision.is_foreign)
        self.decision.agreement.see(lambda: self.optimizers)
        self.decision.optimizers = lambda: self.optimizers
        self.decision.on_explained = self.meter.leave_out
        self.headroom = HeadroomTracker(
            self.watches,
            options.headroom_bits,
            options.underflow_every,
            options.sync == "lagged",
        )
        self._telling = MetricsDispatcher(exporters_of(options.metrics))
        may_skip = options.may_skip and bool(self._gates)
        self._judge = StepJudge(options, self.watches, self.decision, may_skip)
        for watch in self.watches:
            watch.shield = self.isolation.isolated
            if may_skip:
                watch.on_forward = self._before_forward
                watch.on_forward_end = self._after_forward
        self._judge.flags.want(self._gates)
        self._cadence = WatchSchedule(
            options.every, options.warmup, options.ranges, options.budget
        )
        self._has_budget = options.budget is not None
        self._called: set[OptimizerHook] = set()
        self._last_seen: Report | None = None
        self.step = 0
        self._num_steps = 0
        self.level = ScanLevel.OFF
        self.is_enabled = False

    # Hooks on and off.

    def enable(self) -> None:
        """Puts the hooks on that the next step needs."""
        if self.is_enabled:
            return
        self.is_enabled = True
        if self._judge.buffers is not None:
            self._judge.buffers.begin()
        for gate in self._gates:
            gate.attach()
        scalers.listen(self)
        self.meter.restart()
        self._set_level(self._cadence.level(self.step))

    def disable(self) -> None:
        """Takes all hooks off, and forgets what was not judged."""
        if not self.is_enabled:
            return
        self.is_enabled = False
        scalers.stop_listening(self)
        for gate in self._gates:
            gate.detach()
        self.level = ScanLevel.OFF
        for watch in self.watches:
            watch.detach()
        self._judge.forget()

    def _set_level(self, level: ScanLevel) -> None:
        self.level = level
        self.headroom.begin_step()
        for watch in self.watches:
            watch.attach() if level is ScanLevel.ALL else watch.rest()
        if self._judge.buffers is not None and level is not ScanLevel.OFF:
            self._judge.buffers.prepare()

    def set_step(self, number: int) -> None:
        """Gives the step under way another number, from which the next ones count."""
        if number == self.step:
            return
        self._cadence.move(number - self.step)
        self.step = number
        if self.is_enabled:
            self._set_level(self._cadence.level(number))

    def note_batch(self, batch: object) -> None:
        """Notes the batch of a trainer's step, which calls the models.

        Args:
            batch: The batch, in any nesting. It is held weakly. None after the step.
        """
        with self.isolation.measured():
            noted = None if batch is None else LoopBatch(batch)
            for watch in self.watches:
                number, num_calls = watch.batch_number, watch.total_calls
                watch.loop_batches.note(number, num_calls, noted)

    # What the guard asks for.

    def run(self, function: Callable[[], Any]) -> Any:
        """Calls a function that calls the models; keeps it until the step is judged."""
        capture, model = self.decision.capture, self.watches[0].model
        is_watched = self.is_enabled and self.level is ScanLevel.ALL
        if capture is None or model is None or not is_watched:
            return function()
        output = capture.run(model, function, self.isolation.isolated)
        with self.isolation.isolated():
            self.record_loss(loss_in(output))
        return output

    def record_loss(self, loss: torch.Tensor | None) -> None:
        """Adds the loss that a function has returned to the step."""
        watch = self.watches[0]
        if loss is not None and self.options.wanted.loss:
            watch.has_seen_loss = True
            watch.record(_C.FrameKind.RECORDED, (["loss"], [loss]))

    def check(self) -> Report | None:
        """Judges what has run since the last step."""
        if not self.is_enabled:
            return None
        with self.meter:
            report = self._judge.judge_now(self.step, self.level)
        self._end_headroom(self.step, report is not None)
        self.headroom.begin_step()
        return report

    def finish(self) -> None:
        """Judges what is on its way, and takes the hooks off."""
        try:
            if self.is_enabled:
                self._judge.judge_late()
        finally:
            self.disable()
            self.decision.close()

    def discard(self) -> None:
        """Forgets what was found and not judged."""
        self._judge.forget()
        if self._judge.buffers is not None:
            self._judge.buffers.keep()

    def coverage(self) -> GuardCoverage:
        """What was looked at so far."""
        return GuardCoverage.of(
            self.watches,
            self._num_steps,
            self.meter.num_watched,
            self._judge.tensors.without_gradient,
            self.isolation.num_failures,
            self.rules.unused(),
        )

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that are still there."""
        found = [gate.optimizer for gate in self._gates]
        return [optimizer for optimizer in found if optimizer is not None]

    def models(self) -> dict[str, nn.Module]:
        """The watched models by the prefix of their modules' names.

        Raises:
            RuntimeError: If none of them is there any more.
        """
        models = {w.prefix: w.model for w in self.watches if w.model is not None}
        if not models:
            raise RuntimeError(
                "the model is gone: the guard holds it weakly, so keep it yourself"
            )
        return models

    def learn(self, steps: int, adopt: bool) -> None:
        """Learns from the next clean steps what is not finite by design."""
        self.decision.learning = Learning(
            steps, adopt, self.rules, self.watches, self.decision.agreement
        )

    def self_test(
        self, batch: Any, loss: Loss | None, layers: Sequence[str] | None, most: int
    ) -> SelfTestResult:
        """Plants faults under watches like the guard's, which pauses meanwhile."""
        options = dataclasses.replace(self.options, evidence=None)
        watches = make_watches(
            self.models(), options, self.rules, lambda _: None, self.defer
        )
        gather = self.decision.agreement.gather
        test = SelfTest(watches, batch, loss, layers, most, gather)
        with self.suspended():
            return test.run()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Sees nothing meanwhile; what was found before is judged as ever."""
        for watch in self.watches:
            watch.rest()
        try:
            yield
        finally:
            if self.is_enabled:
                self._set_level(self.level)
                self.meter.restart()

    def metrics(self) -> dict[str, float]:
        """What the guard has measured up to now, as numbers."""
        not_scanned = (watch.recorder.coverage.not_scanned for watch in self.watches)
        values = {
            "steps_total": self._num_steps,
            "not_scanned_total": sum(not_scanned),
            **self.decision.metrics(),
            **self.meter.metrics(),
            **self.headroom.metrics(),
        }
        return {name: float(value) for name, value in values.items()}

    @property
    def joinable(self) -> GuardJoinable:
        """What `Join` takes."""
        if self.options.sync == "lagged":
            raise RuntimeError(
                "joinable needs a guard with sync='step': a lagged verdict comes when "
                "ranks have run out of batches in between"
            )
        return self.decision.agreement.make_joinable(self._judge_others)

    # What the hooks call.

    def _before_forward(self, watch: ModelWatch) -> None:
        with self.isolation.measured():
            if self._judge.buffers is not None:
                self._judge.buffers.before_forward(watch)

    def _after_forward(self, watch: ModelWatch) -> None:
        with self.isolation.measured():
            if self._judge.buffers is not None:
                self._judge.buffers.after_forward(watch)

    def _before_step(self, gate: OptimizerHook) -> bool:
        if self.rounds.has_stepped(gate):
            self._end_round()
        self.rounds.begin()
        self._called.add(gate)
        if self.level is ScanLevel.OFF and not self._joins_every_step:
            self.rounds.note_unwatched(gate)
            return False
        try:
            with self.isolation.measured():
                is_skipped = self._judge_step(gate)
                gate.tell_wrapper(is_skipped)
                return is_skipped
        except NonFiniteError:
            self._after_step(gate, is_skipped=True)  # which nobody else will call
            raise
        return False

    def _judge_step(self, gate: OptimizerHook) -> bool:
        if self.rounds.report is not None:
            return self._pass_over(gate, self.rounds.report)
        scaler = scalers.scaler_of(gate.layers)
        others = [
            optimizer
            for other in self._gates
            if other is not gate and not self.rounds.has_stepped(other)
            if (optimizer := other.optimizer) is not None
        ]
        # Without a batch the gradients are those of an earlier step.
        is_shadowing = self.decision.agreement.is_shadowing
        level = ScanLevel.OFF if is_shadowing else self.level
        num_agreed = self.decision.num_agreed
        try:
            return self._judge.judge_step(gate, scaler, self.step, level, others)
        except NonFiniteError:
            raise
        except Exception as error:
            if self.decision.num_agreed > num_agreed or self.decision.is_foreign(error):
                raise
            self.isolation.note(error)
            return self._join_others(gate)

    def _join_others(self, gate: OptimizerHook) -> bool:
        """Decides with the other ranks, which wait, without a finding of one's own."""
        if not self.decision.agreement.is_needed:
            return False
        restore = self._judge.restore
        report = self.decision.decide(
            StepResult(self.step, [], gate=gate, restore=restore)
        )
        return report is not None and report.action == "skip"

    def _pass_over(self, gate: OptimizerHook, report: Report) -> bool:
        """Has the verdict of a round that is bad hold for another of its steps."""
        is_skipped = report.action == "skip"
        self._judge.pass_over(is_skipped)
        self.rounds.note(gate, is_skipped, is_skipped)
        if report.action == "raise":
            raise NonFiniteError(report)
        return is_skipped

    def _after_step(self, gate: OptimizerHook, is_skipped: bool) -> None:
        buffers = self._judge.buffers
        if buffers is not None and not is_skipped:
            with self.isolation.measured():
                buffers.keep()
        if self.rounds.note_step(gate):
            self._end_round()

    def _end_round(self) -> None:
        self.rounds.end()
        self.decision.end_round()
        level, step = self.level, self.step
        self.step += 1
        self._num_steps += 1
        self._judge.tensors.begin_round()
        is_bad = self.decision.last_report is not self._last_seen
        if is_bad:
            self._last_seen = self.decision.last_report
            self._cadence.alarm()
        cost = self.meter.end_step(level is not ScanLevel.OFF)
        self._cadence.note(step, level, cost.guard_seconds, cost.step_seconds)
        if level is not ScanLevel.OFF:
            self._end_headroom(step, is_bad)
            self._telling.tell(step, self.metrics)
        self._set_level(self._cadence.level(self.step))

    def _end_headroom(self, step: int, is_bad: bool) -> None:
        with self.isolation.measured():
            self.headroom.end_step(step, self._judge.has_scaler, is_bad)

    def before_scaler_step(self, optimizer: Optimizer) -> None:
        """Begins to watch whether a scaler lets its optimizer step."""
        for gate in self._gates:
            if gate.is_of(optimizer):
                self._called.discard(gate)
                gate.cover()

    def after_scaler_step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Judges a step that a GradScaler did not let its optimizer make."""
        for gate in self._gates:
            if not gate.is_of(optimizer) or gate in self._called:
                continue
            if self.rounds.has_stepped(gate):
                self._end_round()
            self.rounds.begin()
            try:
                if self.level is not ScanLevel.OFF or self._joins_every_step:
                    with self.isolation.measured():
                        self._judge_scaler_skip(gate, scaler)
            finally:
                self._after_step(gate, is_skipped=self.rounds.is_skipped)

    def _judge_scaler_skip(self, gate: OptimizerHook, scaler: GradScaler) -> None:
        if self.rounds.report is not None:
            self._pass_over(gate, self.rounds.report)
        else:
            self._judge.judge_scaler_skip(gate, scaler, self.step, self.level)

    def _judge_others(self) -> None:
        """Judges a step that other ranks make, and this one has no batch for."""
        if not self.is_enabled:
            return
        try:
            if self.level is not ScanLevel.OFF or self._joins_every_step:
                self.rounds.begin()
                with self.isolation.measured():
                    gate = self._gates[0] if self._gates else None
                    self.decision.decide(StepResult(self.step, [], gate=gate))
        finally:
            self._end_round()

    def _on_evaluated(self, watch: ModelWatch) -> None:
        with self.isolation.measured():
            self._judge.judge_evaluated(watch, self.step)

    @property
    def _joins_every_step(self) -> bool:
        """Whether other ranks may watch a step that this one does not."""
        return self._has_budget and self.decision.agreement.is_needed
