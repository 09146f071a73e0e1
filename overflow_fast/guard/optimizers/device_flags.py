"""Lets devices skip bad steps by themselves, without a sync: `sync="lagged"`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..config import GuardConfig
from ..undo.restore_point import RestorePoint
from ..watching.watch import ModelWatch
from .optimizer_hook import OptimizerHook


class DeviceFlags:
    """The flags that recorders compute on their devices, for `sync="lagged"`.

    Args:
        config: The guard's; its verdicts are lagged.
        watches: The watched models.

    Attributes:
        are_computed: An optimizer reads them.
    """

    def __init__(self, config: GuardConfig, watches: Sequence[ModelWatch]) -> None:
        self._config = config
        self._may_skip = config.on_overflow in ("skip", "raise")
        self._watches = watches
        self.are_computed = False

    def request(self, hooks: Sequence[OptimizerHook]) -> None:
        """Makes devices compute flags if one of these optimizers can skip by them."""
        if self._may_skip and any(hook.found_inf.is_read for hook in hooks):
            self.are_computed = True
            for watch in self._watches:
                watch.recorder.want_flags()

    def are_lagged(self, hook: OptimizerHook) -> bool:
        """True if a lagged guard may judge an optimizer's step after it was made."""
        if callable(self._config.on_overflow):
            return False
        return self._config.on_overflow != "skip" or hook.found_inf.is_read

    def hand_over(self, hook: OptimizerHook, has_scaler: bool) -> torch.Tensor | None:
        """Makes the optimizer's kernels skip the step if a flag is set; no sync.

        Args:
            hook: The optimizer's.
            has_scaler: A GradScaler steps it: the scaler's own flag covers gradients.

        Returns:
            The flag, float32 of no dimensions on one device, or None if the optimizer
            does not read it or there is none.
        """
        if not self.are_computed:
            return None
        found = [f for watch in self._watches for f in watch.recorder.take_flags()]
        if not found or not hook.found_inf.is_read:
            return None
        parts = [flag[0] if has_scaler else flag.amax() for flag in found]
        first, *others = parts
        for other in others:
            first = torch.maximum(first, other.to(first.device, non_blocking=True))
        hook.found_inf.set(first)
        return first

    def skip(
        self, hook: OptimizerHook, has_scaler: bool, start: RestorePoint | None
    ) -> bool:
        """Makes the device skip a step, and put buffers back, if it is bad.

        Args:
            hook: The hook of its optimizer.
            has_scaler: A GradScaler steps it.
            start: The models as they were when the step began, or None.

        Returns:
            True if the device decides on it.
        """
        flag = self.hand_over(hook, has_scaler)
        if flag is not None and start is not None:
            start.restore_where(flag)
        return flag is not None
