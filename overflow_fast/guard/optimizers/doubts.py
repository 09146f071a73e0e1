"""Doubts whether a step may overflow although its gradients are finite."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..isolation import ErrorIsolation
from ..step_clock import StepClock
from ..watching.watch import ModelWatch
from .optimizer_hook import OptimizerHook
from .updates import may_overflow

_HARMLESS = 4.0  # a gradient that no update makes too large for float16


class Doubts:
    """Doubts steps by their largest gradient, and by the rates of their optimizers.

    Args:
        watches: The watched models.
        clock: The step at hand.
        isolation: Isolates the guard's own errors.
    """

    def __init__(
        self,
        watches: Sequence[ModelWatch],
        clock: StepClock,
        isolation: ErrorIsolation,
    ) -> None:
        self._watches = watches
        self._clock = clock
        self._isolation = isolation

    def may_overflow(self, hook: OptimizerHook, is_lagged: bool = False) -> bool:
        """True if a step may overflow although its gradients are finite.

        Args:
            hook: That of its optimizer.
            is_lagged: The stats of the step are on their way. A rate that lies on a GPU
                is not read then; else that incurs a CPU-GPU sync.
        """
        largest = max(watch.recorder.largest_gradient for watch in self._watches)
        optimizer = hook.optimizer
        if optimizer is None or not self._clock.is_watched:
            return False
        rate = _largest_rate(optimizer, reads_devices=not is_lagged)
        if largest <= _HARMLESS and rate <= 1.0:
            return False
        with self._isolation.isolated():
            return may_overflow(optimizer, largest, rate)
        return False


def _largest_rate(optimizer: Optimizer, reads_devices: bool) -> float:
    """The largest magnitude of the rates; inf if one is not finite, 0 for none."""
    largest = 0.0
    for group in optimizer.param_groups:
        rate: Any = group.get("lr")
        if type(rate) is not float:
            rate = _number_of(rate, reads_devices)
        size = abs(rate)
        if not size <= largest:  # of a nan, too
            largest = size if size < _INF else _INF
    return largest


_INF = float("inf")


def _number_of(rate: Any, reads_devices: bool) -> float:
    is_there = not isinstance(rate, torch.Tensor) or rate.is_cpu
    with contextlib.suppress(Exception):  # such as a tensor without values
        return float(rate) if is_there or reads_devices else 0.0
    return 0.0
