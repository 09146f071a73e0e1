"""Takes what a training loop hands over: batches, losses, functions to run again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from .. import _C
from ..core.tensors import loss_in
from ..recording.loop_batches import LoopBatch
from ..recording.schedule import ScanLevel
from ..recording.step_tensors import StepTensors
from ..recording.watch import ModelWatch
from ..replay.capture import Capture
from .arguments import NORM
from .config import GuardConfig
from .isolation import ErrorIsolation
from .step_clock import StepClock


class LoopInputs:
    """Takes in what the training loop hands over for the step at hand.

    Args:
        config: The guard's.
        watches: The watched models.
        capture: Keeps the calls of a step, or None.
        clock: Has the step's level.
        tensors: Scans what stands in no module's call.
        isolation: Isolates the guard's own errors.
        optimizers: Returns the guard's optimizers.
    """

    def __init__(
        self,
        config: GuardConfig,
        watches: Sequence[ModelWatch],
        capture: Capture | None,
        clock: StepClock,
        tensors: StepTensors,
        isolation: ErrorIsolation,
        optimizers: Callable[[], Sequence[Optimizer]],
    ) -> None:
        self._config = config
        self._watches = watches
        self._capture = capture
        self._clock = clock
        self._tensors = tensors
        self._isolation = isolation
        self._optimizers = optimizers

    def note_batch(self, batch: object) -> None:
        """Notes the batch of a trainer's step, which calls the models.

        Args:
            batch: The batch, in any nesting. It is held weakly. None after the step.
        """
        with self._isolation.measured():
            noted = None if batch is None else LoopBatch(batch)
            for watch in self._watches:
                number, num_calls = watch.batch_number, watch.total_calls
                watch.inputs.loop_batches.note(number, num_calls, noted)

    def run(self, function: Callable[[], Any], records_loss: bool = True) -> Any:
        """Calls a function that calls the models; keeps it until the step is judged."""
        model = self._watches[0].model
        is_watched = self._clock.level is ScanLevel.ALL
        if self._capture is None or model is None or not is_watched:
            output = function()
        else:
            output = self._capture.run(model, function, self._isolation.isolated)
        with self._isolation.isolated():
            loss = loss_in(output)
            if loss is not None and self._config.wanted.loss and records_loss:
                self.record({"loss": loss})
        return output

    def record(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Adds tensors that no module returns to the step, if it is watched.

        Where gradients alone are watched, only single numbers, such as a loss.
        """
        level, watch = self._clock.level, self._watches[0]
        if level is ScanLevel.GRADIENTS:
            tensors = {name: t for name, t in tensors.items() if t.numel() == 1}
        if level is ScanLevel.OFF or not tensors:
            return
        watch.has_seen_loss |= "loss" in tensors
        if self._config.is_tripwire and NORM in tensors:
            self._tensors.note_norm(self._optimizers())
        watch.record(_C.FrameKind.RECORDED, (list(tensors), list(tensors.values())))
