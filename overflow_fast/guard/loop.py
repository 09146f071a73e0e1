"""Assembles the parts of a guard, and runs them for a training loop."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import _C
from ..core.tensors import loss_in
from ..distributed.joinable import GuardJoinable
from ..recording.loop_batches import LoopBatch
from ..recording.schedule import ScanLevel, WatchSchedule
from ..recording.watch import ModelWatch
from ..report.guard_coverage import GuardCoverage
from ..report.report import Report
from ..verdict.rules import Rules
from .buffer_snapshot import BufferSnapshot
from .config import GuardConfig
from .isolation import ErrorIsolation
from .learning import Learning
from .measurements import Measurements
from .optimizer_hook import OptimizerHook
from .optimizer_steps import OptimizerSteps
from .policy_engine import PolicyEngine
from .rounds import Rounds
from .step_clock import StepClock
from .step_judge import StepJudge
from .watched_models import living_models, make_watches


class GuardLoop:
    """The parts of a guard; the hooks of models and optimizers hold it.

    Args:
        config: The guard's.
        models: The models, by the prefix of their modules' names.
        optimizers: The optimizers.
        defer: Treat the CPU as a device.
    """

    def __init__(
        self,
        config: GuardConfig,
        models: Mapping[str, nn.Module],
        optimizers: Sequence[Optimizer],
        defer: bool,
    ) -> None:
        self.config = config
        self.rules = Rules(config.allow)
        self.watches = make_watches(
            models, config, self.rules, self._on_evaluated, defer
        )
        self._defer = defer
        self.is_enabled = False
        self._hooks = [
            OptimizerHook(
                each,
                lambda hook: self.steps.before_step(hook),
                lambda hook, is_skipped: self.steps.after_step(hook, is_skipped),
                may_skip=config.on_overflow != "warn",
            )
            for each in optimizers
        ]
        self.rounds = Rounds(self._hooks)
        self.measurements = Measurements(
            config,
            self.watches,
            lambda: {"steps_total": self.clock.num_steps, **self.engine.metrics()},
        )
        self.timer = self.measurements.timer
        self.headroom = self.measurements.headroom
        self.engine = PolicyEngine(
            config,
            self.watches,
            self.rounds,
            lambda: self.timer.cost,
            lambda: self.coverage().gaps(),
            lambda: self.steps.optimizers,
            self.timer.leave_out,
        )
        self.isolation = ErrorIsolation(self.timer, self.engine.is_foreign)
        may_skip = config.may_skip and bool(self._hooks)
        self._buffers = BufferSnapshot(self.watches) if may_skip else None
        schedule = WatchSchedule(
            config.every, config.warmup, config.ranges, config.budget
        )
        self.clock = StepClock(schedule, self.watches, self.headroom, self._buffers)
        self._judge = StepJudge(
            config, self.watches, self.engine, self.clock, self._buffers
        )
        self.steps = OptimizerSteps(
            self._hooks,
            self.rounds,
            self._judge,
            self.engine,
            self.isolation,
            self.clock,
            self.measurements,
            joins_unwatched=config.budget is not None,
        )
        for watch in self.watches:
            watch.isolate_errors = self.isolation.isolated
            if self._buffers is not None:
                measured = self.isolation.measured_call
                watch.on_forward = measured(self._buffers.before_forward)
                watch.on_forward_end = measured(self._buffers.after_forward)
        self._judge.flags.request(self._hooks)

    # Hooks on and off.

    def enable(self) -> None:
        """Attaches the hooks that the next step needs."""
        if self.is_enabled:
            return
        self.is_enabled = True
        if self._buffers is not None:
            self._buffers.begin()
        self.steps.attach()
        self.timer.restart()
        self.clock.start()

    def disable(self) -> None:
        """Removes all hooks, and forgets what was not judged."""
        if not self.is_enabled:
            return
        self.is_enabled = False
        self.steps.detach()
        self.clock.stop()
        self._judge.forget()

    # The training loop's calls.

    def note_batch(self, batch: object) -> None:
        """Notes the batch of a trainer's step, which calls the models.

        Args:
            batch: The batch, in any nesting. It is held weakly. None after the step.
        """
        with self.isolation.measured():
            noted = None if batch is None else LoopBatch(batch)
            for watch in self.watches:
                number, num_calls = watch.batch_number, watch.total_calls
                watch.inputs.loop_batches.note(number, num_calls, noted)

    def run(self, function: Callable[[], Any]) -> Any:
        """Calls a function that calls the models; keeps it until the step is judged."""
        capture, model = self.engine.capture, self.watches[0].model
        is_watched = self.is_enabled and self.clock.level is ScanLevel.ALL
        if capture is None or model is None or not is_watched:
            return function()
        output = capture.run(model, function, self.isolation.isolated)
        with self.isolation.isolated():
            loss = loss_in(output)
            if loss is not None and self.config.wanted.loss:
                self.record({"loss": loss})
        return output

    def record(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Adds tensors that no module returns to the step."""
        watch = self.watches[0]
        watch.has_seen_loss |= "loss" in tensors
        watch.record(_C.FrameKind.RECORDED, (list(tensors), list(tensors.values())))

    def check(self) -> Report | None:
        """Judges what has run since the last step."""
        if not self.is_enabled:
            return None
        with self.steps.checked(), self.timer:
            report = self._judge.judge_now()
        self.steps.end_headroom(self.clock.step, report is not None)
        self.headroom.begin_step()
        return report

    def finish(self) -> None:
        """Judges what is on its way, and removes the hooks."""
        try:
            if self.is_enabled:
                self._judge.judge_late()
        finally:
            self.disable()
            self.engine.close()
            self.steps.record.close()

    def discard(self) -> None:
        """Forgets what was found and not judged."""
        self._judge.forget()
        if self._buffers is not None:
            self._buffers.keep()

    def learn(self, steps: int, adopt: bool) -> None:
        """Learns from the next clean steps which values are non-finite by design."""
        self.engine.learning = Learning(
            steps, adopt, self.rules, self.watches, self.engine.agreement
        )

    def twin_watches(self) -> list[ModelWatch]:
        """Makes watches like the guard's, which nothing judges."""
        config = dataclasses.replace(self.config, evidence=None)
        models = living_models(self.watches)
        return make_watches(models, config, self.rules, lambda _: None, self._defer)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Watches nothing within; findings from before are judged as usual."""
        try:
            with self.clock.suspended():
                yield
        finally:
            if self.is_enabled:
                self.timer.restart()

    # What users read.

    def coverage(self) -> GuardCoverage:
        """Returns what was checked so far."""
        return GuardCoverage.of(
            self.watches,
            self.clock.num_steps,
            self.timer.num_watched,
            self._judge.tensors.without_gradient,
            self.isolation.num_failures,
            self.rules.unused(),
        )

    @property
    def joinable(self) -> GuardJoinable:
        """The object that `Join` takes."""
        if self.config.sync == "lagged":
            raise RuntimeError(
                "joinable needs a guard with sync='step': a lagged verdict comes when "
                "ranks have run out of batches in between"
            )
        return self.engine.agreement.make_joinable(self._judge_others)

    # The hooks' calls.

    def _on_evaluated(self, watch: ModelWatch) -> None:
        with self.isolation.measured():
            self._judge.judge_evaluated(watch)

    def _judge_others(self) -> None:
        if self.is_enabled:
            self.steps.judge_others()
