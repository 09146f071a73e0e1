"""Lets devices skip bad steps by themselves, without a sync: `sync="lagged"`."""

from __future__ import annotations

import torch

from ..core import GuardCore
from ..undo.restore_point import RestorePoint
from .optimizer_hook import OptimizerHook


class DeviceFlags:
    """The flags that recorders compute on their devices, for `sync="lagged"`.

    Devices compute them if one of the optimizers can skip by them.

    Args:
        guard: The core of a guard whose verdicts are lagged.
    """

    def __init__(self, guard: GuardCore) -> None:
        self._policy, self._watches = guard.config.on_overflow, guard.watches
        may_skip = self._policy in ("skip", "raise")
        self._are_computed = may_skip and any(
            hook.found_inf.is_read for hook in guard.hooks
        )
        for watch in guard.watches if self._are_computed else ():
            watch.recorder.want_flags()

    def are_lagged(self, hook: OptimizerHook) -> bool:
        """True if a lagged guard may judge an optimizer's step after it was made."""
        if callable(self._policy):
            return False
        return self._policy != "skip" or hook.found_inf.is_read

    def skip(
        self, hook: OptimizerHook, has_scaler: bool, start: RestorePoint | None
    ) -> bool:
        """Makes the device skip a step, and put buffers back, if it is bad; no sync.

        Args:
            hook: The hook of its optimizer, whose kernels read the flag.
            has_scaler: A GradScaler steps it: the scaler's own flag covers gradients.
            start: The models as they were when the step began, or None.

        Returns:
            True if the device decides on it.
        """
        if not self._are_computed:
            return False
        found = [f for watch in self._watches for f in watch.recorder.take_flags()]
        if not found or not hook.found_inf.is_read:
            return False
        first, *others = [flag[0] if has_scaler else flag.amax() for flag in found]
        for other in others:
            first = torch.maximum(first, other.to(first.device, non_blocking=True))
        hook.found_inf.set(first)
        if start is not None:
            start.restore_where(first)
        return True
