"""Judges steps: at once, one step later, and where a GradScaler makes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ..recording.schedule import ScanLevel
from ..recording.step_tensors import StepTensors
from ..recording.watch import ModelWatch
from ..report.report import Report
from ..state.step_start import StepStart
from ..verdict.verdict import BadFrame
from .config import GuardConfig
from .device_flags import DeviceFlags
from .monitors.monitor import Notice
from .monitors.running import RunningMonitors
from .optimizer_hook import OptimizerHook
from .policy_engine import PolicyEngine
from .scalers import SCALER, has_skipped, will_skip, without_expected, without_gradients
from .step_clock import StepClock
from .step_flags import StepFlags
from .step_frames import PendingStep, StepFrames
from .step_result import StepResult


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
