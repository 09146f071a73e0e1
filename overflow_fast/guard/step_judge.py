"""When a step is judged, and by which frames: at once, lagged, under a scaler."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from .. import _C
from ..recording.schedule import ScanLevel
from ..recording.step_tensors import StepTensors
from ..recording.watch import ModelWatch
from ..report.report import Report
from ..verdict.verdict import BadFrame
from .buffer_snapshot import BufferSnapshot
from .config import GuardConfig
from .device_flags import DeviceFlags
from .optimizer_hook import OptimizerHook
from .policy_engine import PolicyEngine
from .scalers import SCALER, has_found_inf, without_scalers
from .step_result import StepResult


@dataclass
class _Step:
    """A step whose stats may still be on their way."""

    number: int
    last_frame: int
    gate: OptimizerHook | None = None
    scaler: GradScaler | None = None
    is_decided: bool = False  # by what was known when its optimizer was called
    skipped_by: str = ""


class StepJudge:
    """Collects a step's bad frames and has them decided on.

    Args:
        options: The guard's.
        watches: The watched models.
        decision: Who decides.
        may_skip: Whether there is an optimizer's step that may be skipped.

    Attributes:
        buffers: The restore point of skipped steps, or None.
        flags: Skip steps on the device.
        has_scaler: Whether a GradScaler has called an optimizer.
    """

    def __init__(
        self,
        options: GuardConfig,
        watches: Sequence[ModelWatch],
        decision: PolicyEngine,
        may_skip: bool,
    ) -> None:
        self._options = options
        self._watches = watches
        self._decision = decision
        self._steps: collections.deque[_Step] = collections.deque()
        self.flags = DeviceFlags(options, watches)
        self.has_scaler = False
        self.tensors = StepTensors(watches)
        self.buffers = BufferSnapshot(watches) if may_skip else None

    def judge_step(
        self,
        gate: OptimizerHook,
        scaler: GradScaler | None,
        number: int,
        level: ScanLevel,
        others: Sequence[Optimizer] = (),
    ) -> bool:
        """Judges a step that an optimizer is about to make.

        Args:
            gate: The optimizer's.
            scaler: The GradScaler that calls it, or None.
            number: The step's.
            level: How much of it was looked at.
            others: The optimizers that are to step later in the round.

        Returns:
            Whether to skip it.

        Raises:
            NonFiniteError: If the policy says so.
        """
        self.has_scaler |= scaler is not None
        self.tensors.scan(gate.optimizer, level, () if scaler else others)
        is_lagged = self._is_lagged(gate)
        self._send(is_lagged)
        if self._decision.is_learning:
            self.flags.drop()
        step = _Step(number, _C.Recorder.num_frames(), gate, scaler)
        flag = self.flags.hand_over(gate, scaler is not None) if is_lagged else None
        if flag is not None:
            step.skipped_by = "optimizer's kernel"
            if self.buffers is not None:
                self.buffers.restore_where(flag)
        try:
            self._receive(is_lagged)
            # Ranks decide together, once for each step.
            waits = is_lagged and self._decision.agreement.is_needed
            frames, skipped_by = [] if waits else self._take(step), ""
            is_whole = _is_whole(frames, level)
            if scaler is not None and any(bad.is_gradient for bad in frames):
                is_scalers = has_found_inf(gate.optimizer) and scaler.get_scale() > 1
                frames, skipped_by = without_scalers(frames, is_scalers)
            if gate.is_called_off:
                skipped_by = "other guard"
            if is_lagged:
                self._steps.append(step)
                if not frames:
                    return False
            step.is_decided = True
            found = StepResult(
                *(number, frames, not skipped_by, skipped_by, self.tensors),
                gate=gate,
                restore=self.restore,
                is_whole=is_whole,
            )
            report = self._decision.decide(found)
            return report is not None and report.action == "skip"
        finally:
            self._end(is_lagged)

    def judge_scaler_skip(
        self, gate: OptimizerHook, scaler: GradScaler, number: int, level: ScanLevel
    ) -> None:
        """Judges a step that a GradScaler has skipped.

        Gradients that are bad because of the scale are its business: no alarm, until
        the scale is down to 1. Incurs a CPU-GPU sync, as the scaler just did.

        Args:
            gate: The optimizer's.
            scaler: The scaler.
            number: The step's.
            level: How much of it was looked at.

        Raises:
            NonFiniteError: If the policy says so.
        """
        self.has_scaler = True
        self.tensors.scan(gate.optimizer, level)
        self._send()
        try:
            self._receive(is_lagged=False)
            frames = self._take(_Step(number, _C.Recorder.num_frames()))
            if scaler.get_scale() > 1:
                frames, _ = without_scalers(frames, has_found_inf=True)
            self._decision.decide(
                StepResult(
                    *(number, frames, False, SCALER, self.tensors),
                    gate=gate,
                    restore=self.restore,
                )
            )
        finally:
            self._end(is_lagged=False)

    def pass_over(self, is_skipped: bool) -> None:
        """Lets go of what was found since the last judgement: the round is bad anyway.

        Args:
            is_skipped: Whether to put back what the forward changed.
        """
        self._send()
        self._receive(is_lagged=False)
        self._take(_Step(0, _C.Recorder.num_frames()))
        if is_skipped:
            self.restore()
        self._end(is_lagged=False)

    def judge_now(self, number: int, level: ScanLevel) -> Report | None:
        """Judges all that has run. Incurs the sync.

        Args:
            number: The step's that is under way.
            level: How much of it was looked at.

        Returns:
            The report of what is bad, or None.

        Raises:
            NonFiniteError: If the policy says so.
        """
        self.tensors.begin_round()
        self.tensors.scan(None, level)
        self._send()
        try:
            self._receive(is_lagged=False)
            frames = self._take(_Step(number, _C.Recorder.num_frames()))
            frames += [
                BadFrame(watch, frame)
                for watch in self._watches
                for frame in watch.take_evaluated()
            ]
            found = StepResult(
                number,
                frames,
                tensors=self.tensors,
                is_whole=_is_whole(frames, level),
                is_check=True,
            )
            return self._decision.decide(found)
        finally:
            self._end(is_lagged=False)

    def judge_late(self) -> None:
        """Judges the steps that are still on their way. Incurs the sync.

        Raises:
            NonFiniteError: If the policy says so.
        """
        self._receive(is_lagged=False)

    def judge_evaluated(self, watch: ModelWatch, number: int) -> None:
        """Judges a forward without autograd: at once on the CPU, else lagged.

        Args:
            watch: The model's.
            number: The step's that is under way.

        Raises:
            NonFiniteError: If the policy says so.
        """
        frames = [BadFrame(watch, frame) for frame in watch.take_evaluated()]
        if frames:
            model = watch.model
            if self.buffers is not None and model is not None and model.training:
                self.buffers.hold(watch)
            self._decision.decide(StepResult(number, frames, is_of_step=False))

    def forget(self) -> None:
        """Forgets what has run and was not judged."""
        self._steps.clear()
        for watch in self._watches:
            watch.receive(is_lagged=False)
            watch.take_bad(_C.Recorder.num_frames())
            watch.take_evaluated()
        self._end(is_lagged=False)

    # How it is done.

    def _is_lagged(self, gate: OptimizerHook) -> bool:
        """Whether the verdict may come when the step is over."""
        if self._options.sync != "lagged" or callable(self._options.on_overflow):
            return False
        # The flags of devices do not know what is being learned.
        if self._decision.is_learning and self.flags.are_made:
            return False
        return self._options.on_overflow != "skip" or gate.skips_on_device

    def _send(self, is_lagged: bool = False) -> None:
        for watch in self._watches:
            watch.send(with_captured=not is_lagged)

    def _receive(self, is_lagged: bool) -> None:
        for watch in self._watches:
            watch.receive(is_lagged)
        while self._steps:
            step = self._steps.popleft()
            frames, skipped_by = self._take(step), ""
            if step.scaler is not None and any(bad.is_gradient for bad in frames):
                # It has backed off since.
                last_scale = step.scaler.get_scale() / step.scaler.get_backoff_factor()
                frames, skipped_by = without_scalers(frames, last_scale > 1)
            if frames:
                skipped_by = skipped_by or step.skipped_by
            if frames or not step.is_decided:
                found = StepResult(
                    *(step.number, frames),
                    skipped_by=skipped_by,
                    gate=step.gate,
                    is_late=True,
                )
                self._decision.decide(found)

    def _take(self, step: _Step) -> list[BadFrame]:
        return [
            BadFrame(watch, frame)
            for watch in self._watches
            for frame in watch.take_bad(step.last_frame)
        ]

    def restore(self) -> list[str]:
        """Puts back what the forward changed; says what could not be."""
        return [] if self.buffers is None else self.buffers.restore()

    def _end(self, is_lagged: bool) -> None:
        self.tensors.forget()
        for watch in self._watches:
            watch.end_judgement(is_lagged)


def _is_whole(frames: Sequence[BadFrame], level: ScanLevel) -> bool:
    return level is ScanLevel.ALL and not any(bad.is_gradient for bad in frames)
