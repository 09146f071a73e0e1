"""Asks devices' overflow flags, once a step, and adds what they say to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.amp.grad_scaler import GradScaler

from .. import _C, flags
from ..recording.schedule import ScanLevel
from ..recording.watch import ModelWatch
from .step_clock import StepClock


class StepFlags:
    """The overflow flags of the devices of watched models, where there are any.

    Args:
        watches: The watched models.
        clock: Says when a watched step begins.
    """

    def __init__(self, watches: Sequence[ModelWatch], clock: StepClock) -> None:
        self._watches = watches
        clock.on_begin = self.clear

    def clear(self) -> None:
        """Clears the flags, when a watched step begins."""
        for device_type, flag in self._flags().items():
            flags.attempt(device_type, flag.clear)

    def ask(self, level: ScanLevel, scaler: GradScaler | None = None) -> None:
        """Reads the flags; one that is set is an entry of the step that is inf.

        Args:
            level: How much of the step is watched.
            scaler: The GradScaler that makes the step, or None. A scaler asks the flag
                itself, and takes it for a scale that is too large.
        """
        if level is ScanLevel.OFF or scaler is not None:
            return
        for device_type, flag in self._flags().items():
            found = flags.attempt(device_type, flag.read)
            if isinstance(found, torch.Tensor):
                is_set = found.detach().reshape(-1)[:1] != 0
                value = torch.zeros_like(is_set, dtype=torch.float32)
                self._record(device_type, value.masked_fill_(is_set, torch.inf))
            elif found:
                self._record(device_type, torch.full((1,), torch.inf, device="cpu"))

    def _record(self, device_type: str, value: torch.Tensor) -> None:
        named = [flags.label_of(device_type)], [value]
        self._watches[0].record(_C.FrameKind.RECORDED, named)

    def _flags(self) -> dict[str, flags.DeviceFlag]:
        if not flags.are_there():
            return {}
        models = [watch.model for watch in self._watches]
        found = [model for model in models if model is not None]
        return flags.registered(p.device.type for m in found for p in m.parameters())
