"""The `found_inf` flag with which an optimizer's kernels skip a step on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...torch_internals.module_internals import reads_found_inf


class FoundInf:
    """Sets an optimizer's `found_inf` for one step, as a GradScaler does.

    Args:
        optimizer: Returns the optimizer, or None if it is gone.
    """

    def __init__(self, optimizer: Callable[[], Any]) -> None:
        self._optimizer = optimizer
        self._is_set = False

    @property
    def is_read(self) -> bool:
        """True if the optimizer's kernels read the flag.

        torch's fused ones do: torch/optim/{adam,adagrad,sgd}.py.
        """
        optimizer = self._optimizer()
        # Older versions of Adagrad read it too, and do not declare it.
        if isinstance(optimizer, torch.optim.Adagrad) and optimizer.defaults["fused"]:
            return True
        return reads_found_inf(optimizer)

    def set(self, flag: torch.Tensor) -> None:
        """Makes the kernels skip this step where a flag on the device is 1.

        Where a GradScaler has set one, the larger counts. Does not incur a sync.
        """
        optimizer = self._optimizer()
        scalers = getattr(optimizer, "found_inf", None)
        if isinstance(scalers, torch.Tensor):
            flag = flag.to(scalers.device, non_blocking=True)
            torch.maximum(scalers, flag.to(scalers.dtype), out=scalers)
            return
        optimizer.found_inf = flag
        optimizer.grad_scale = None
        self._is_set = True

    def drop(self) -> None:
        """Removes the flag from the optimizer, if `set()` has put it there."""
        if self._is_set:
            self._is_set = False
            for name in ("found_inf", "grad_scale"):
                vars(self._optimizer()).pop(name, None)
