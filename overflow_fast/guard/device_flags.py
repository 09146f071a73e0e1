"""Skips on the device: `found_inf` flags that an optimizer's kernels read, no sync."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..recording.watch import ModelWatch
from .config import GuardConfig
from .optimizer_hook import OptimizerHook


class DeviceFlags:
    """The flags that recorders make on their devices, for `sync="lagged"`.

    Args:
        options: The guard's.
        watches: The watched models.

    Attributes:
        are_made: Some optimizer reads them.
    """

    def __init__(self, options: GuardConfig, watches: Sequence[ModelWatch]) -> None:
        self._may_skip = options.sync == "lagged" and options.on_overflow in (
            "skip",
            "raise",
        )
        self._watches = watches
        self.are_made = False

    def want(self, gates: Sequence[OptimizerHook]) -> None:
        """Makes devices compute flags if one of these optimizers can skip by them."""
        if self._may_skip and any(gate.skips_on_device for gate in gates):
            self.are_made = True
            for watch in self._watches:
                watch.recorder.want_flags()

    def drop(self) -> None:
        """Forgets the flags of the step."""
        for watch in self._watches:
            watch.recorder.take_flags()

    def hand_over(self, gate: OptimizerHook, has_scaler: bool) -> torch.Tensor | None:
        """Makes the optimizer's kernels skip the step if a flag is set; no sync.

        Args:
            gate: The optimizer's.
            has_scaler: Whether a GradScaler steps it: its own flag covers gradients.

        Returns:
            The flag, float32 of no dimensions on one device, or None if the optimizer
            does not read it or there is none.
        """
        if not self.are_made:
            return None
        flags = [f for watch in self._watches for f in watch.recorder.take_flags()]
        if not flags or not gate.skips_on_device:
            return None
        parts = [flag[0] if has_scaler else flag.amax() for flag in flags]
        first, *others = parts
        for other in others:
            first = torch.maximum(first, other.to(first.device, non_blocking=True))
        gate.set_found_inf(first)
        return first
