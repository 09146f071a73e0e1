"""Assembles the parts of a guard, and runs them for a training loop."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..distributed.joinable import GuardJoinable
from ..recording.schedule import WatchSchedule
from ..recording.watch import ModelWatch
from ..report.guard_coverage import GuardCoverage
from ..report.report import Report
from ..state.step_start import StepStart
from ..verdict.rules import Rules
from .config import EVERYTHING, GuardConfig
from .isolation import ErrorIsolation
from .learning import Learning
from .loop_inputs import LoopInputs
from .measurements import Measurements
from .monitors.monitor import Guarded
from .monitors.running import RunningMonitors
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

    gives_way = False  # to a later guard of the same models

    def __init__(
        self,
        config: GuardConfig,
        models: Mapping[str, nn.Module],
        optimizers: Sequence[Optimizer],
        defer: bool,
    ) -> None:
        self.config = config
        self.rules = Rules(config.allow or {})
        self.watches = make_watches(
            models, config, self.rules, self._on_evaluated, defer
        )
        self._defer = defer
        self.is_enabled = False
        self._hooks = [self._hook(each) for each in optimizers]
        self.rounds = Rounds(self._hooks)
        self._is_restored = config.may_restore and bool(self._hooks)
        is_kept = self._is_restored or config.may_replay
        self._start = StepStart(self.watches, bool(self._hooks)) if is_kept else None
        self.measurements = Measurements(config, self.watches, lambda: self._counts())
        self.timer = self.measurements.timer
        self.headroom = self.measurements.headroom
        self.engine = PolicyEngine(
            config,
            self.watches,
            self.rounds,
            self.measurements,
            lambda watches: self.coverage(watches).gaps(),
            lambda: self.steps.optimizers,
            lambda: self.new_watches(watch=EVERYTHING),
            self._start,
        )
        self.isolation = ErrorIsolation(self.timer, self.engine.is_foreign)
        self._make_judge()
        self._make_steps()

    def _hook(self, optimizer: Optimizer) -> OptimizerHook:
        return OptimizerHook(
            optimizer,
            lambda hook: self.steps.before_step(hook),
            lambda hook, is_skipped: self.steps.after_step(hook, is_skipped),
            may_skip=self.config.may_act,
        )

    def _counts(self) -> dict[str, float]:
        counts = {**self.engine.metrics(), **self._monitors.metrics()}
        return {"steps_total": self.clock.num_steps, **counts}

    def _make_judge(self) -> None:
        """Makes the parts that judge a step."""
        config = self.config
        asked = config.schedule
        schedule = WatchSchedule(
            asked.every,
            asked.warmup,
            asked.ranges,
            asked.budget,
            has_gradients=config.wanted.gradients,
        )
        acts = config.may_act and bool(self._hooks)
        self.clock = StepClock(schedule, self.watches, self.headroom, self._start, acts)
        guarded = Guarded(
            self.watches,
            self.engine.capture,
            lambda: self.steps.optimizers,
            self.isolation.isolated,
        )
        self._monitors = RunningMonitors(
            config.monitors,
            guarded,
            self.isolation.isolated,
            looks=config.sync != "lagged",
        )
        self._judge = StepJudge(
            config, self.watches, self.engine, self.clock, self._start, self._monitors
        )
        self._judge.flags.request(self._hooks)
        for watch in self.watches:
            watch.isolate_errors = self.isolation.isolated
            watch.needs_buffers = self._is_restored
            if self._start is not None:
                measured = self.isolation.measured_call
                watch.on_forward = measured(self._start.before_forward)
                watch.on_forward_end = measured(self._start.after_forward)

    def _make_steps(self) -> None:
        """Makes the parts that the training loop and the optimizers call."""
        config, capture = self.config, self.engine.capture
        self.inputs = LoopInputs(
            config,
            self.watches,
            capture,
            self.clock,
            self._judge.tensors,
            self.isolation,
            lambda: self.steps.optimizers,
        )
        self.steps = OptimizerSteps(
            self._hooks,
            self.rounds,
            self._judge,
            self.engine,
            self.isolation,
            self.clock,
            self.measurements,
            self._monitors,
            joins_unwatched=config.schedule.budget is not None,
        )

    # Hooks on and off.

    def enable(self) -> None:
        """Attaches the hooks that the next step needs."""
        if self.is_enabled:
            return
        self.is_enabled = True
        if self._start is not None:
            self._start.begin()
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
        if self._start is not None:
            self._start.keep()

    def learn(self, steps: int, adopt: bool) -> None:
        """Learns from the next clean steps which values are non-finite by design."""
        self.engine.learning = Learning(
            steps, adopt, self.rules, self.watches, self.engine.agreement
        )

    def new_watches(self, **changes: Any) -> list[ModelWatch]:
        """Makes watches like the guard's, which nothing judges.

        Args:
            changes: Fields of the configuration that differ.
        """
        config = dataclasses.replace(self.config, **changes)
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

    def coverage(self, watches: Sequence[ModelWatch] = ()) -> GuardCoverage:
        """Returns what was checked so far, by the guard's watches or by others."""
        return GuardCoverage.of(
            watches or self.watches,
            self.clock.num_steps,
            self.timer.num_watched,
            self._judge.tensors.without_gradient,
            self.isolation.num_failures,
            self.rules.unused(),
            self.config.ignores_spikes,
        )

    @property
    def joinable(self) -> GuardJoinable:
        """The object that `Join` takes."""
        if self.config.sync == "lagged":
            raise RuntimeError(
                "joinable needs a guard with sync='step': a lagged verdict is too late"
            )
        return self.engine.agreement.make_joinable(self._judge_others)

    # The hooks' calls.

    def _on_evaluated(self, watch: ModelWatch) -> None:
        with self.isolation.measured():
            self._judge.judge_evaluated(watch)

    def _judge_others(self) -> None:
        if self.is_enabled:
            self.steps.judge_others()
