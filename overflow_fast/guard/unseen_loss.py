"""Looks at a loss that nobody has given, where gradients do not tell of it.

They are exactly 0, as torch makes them of a mean of nothing, or a loss scaler skips the
step for them, as it does for a scale that is too large. What the running code has
called backward on is looked at then, and is of the step like a loss that was given;
where that is not certain, nothing is. Other steps take a comparison of numbers.
"""

from __future__ import annotations

import logging

import torch

from .. import _C
from ..scanner.ops import are_nonfinite
from .collect import Collector
from .optimizers.loss_scaling import is_scalers
from .outer import outer
from .time_share import TimeShare
from .unit import Unit
from .verdict.bad_frames import BadFrame

_log = logging.getLogger("overflow_fast")


class UnseenLoss:
    """The loss of a step in which nothing was bad.

    Args:
        collector: Collects what was seen.
    """

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._looking = TimeShare()

    def look(self, unit: Unit) -> list[BadFrame]:
        """Records the loss if it is not finite; returns the frames.

        Incurs a CPU-GPU sync where it looks at a loss.

        Args:
            unit: A step that an optimizer is about to make, or a scaler has skipped.
        """
        loss = self._found() if self._is_due(unit) else None
        if loss is None or not any(are_nonfinite([loss])):
            return []
        collector = self._collector
        watch = collector.watches[0]
        watch.has_seen_loss = watch.has_loss_of_step = True
        watch.record(_C.FrameKind.RECORDED, (["loss"], [loss]))
        collector.send()
        collector.receive()
        unit.last_frame = _C.Recorder.num_frames()
        return collector.take(unit.last_frame)

    def _is_due(self, unit: Unit) -> bool:
        collector = self._collector
        is_told = is_scalers(unit.skipped_by) or collector.tensors.are_gradients_zero()
        watches, wanted = collector.watches, collector.wanted
        is_watched = wanted.loss and wanted.grad_outputs
        if not (is_told and is_watched) or self._looking.is_spent:
            return False
        if any(watch.has_loss_of_step for watch in watches):
            return False
        # Without a backward a loop may have left out the loss by itself.
        calls = (call for watch in watches for call in watch.recorder.calls())
        return any(call.kind == _C.FrameKind.BACKWARD for call in calls)

    def _found(self) -> torch.Tensor | None:
        try:
            with self._looking.spending():
                loss: torch.Tensor | None = outer("loss")()
                return loss
        except Exception as error:  # the step is judged without it
            _log.debug("The loss was not looked for: %s", error)
            return None
