"""The overflow flags of devices, asked once a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import _C, flags
from ...base.modules import parameters_of
from ..optimizers.engine_scaler import LossScaler
from .watch import ModelWatch


class OverflowFlags:
    """The overflow flags of the devices of watched models, where there are any.

    Args:
        watches: The watched models.
    """

    def __init__(self, watches: Sequence[ModelWatch]) -> None:
        self._watches = watches

    def clear(self) -> None:
        """Clears the flags, when a watched step begins."""
        for device_type, flag in self._flags().items():
            flags.attempt(device_type, flag.clear)

    def ask(self, scaler: LossScaler | None = None) -> None:
        """Reads the flags; one that is set is an entry of the step that is inf.

        Args:
            scaler: The scaler that makes the step, or None. A scaler asks the flag
                itself, and takes it for a scale that is too large.
        """
        if scaler is not None:
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
        if not flags.of_devices:
            return {}
        models = [model for w in self._watches if (model := w.model) is not None]
        return flags.registered(p.device.type for m in models for p in parameters_of(m))
