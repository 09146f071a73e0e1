"""Doubts whether a step may overflow although its gradients are finite."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from ..core import GuardCore
from .optimizer_hook import OptimizerHook
from .updates import is_torchs, may_overflow

_HARMLESS = 4.0  # a gradient that no update makes too large for float16
# Steps in which an optimizer's states are 0, or were before: chosen. With less, what
# divides by them is seen as bad weights in the step after.
_FIRST_STEPS = 2


class Doubts:
    """Doubts steps by their largest gradient, and by the rates of their optimizers.

    Of an optimizer that is not torch's the arithmetic is not known: it may divide by a
    norm of 0, or cast to a narrow dtype. It is doubted in its first steps, also of
    weights that have gradients later than others, and where the largest gradient is
    larger, or more of them are 0, than in any step before. Of steps in which some are 0
    the 1st, 2nd, 4th, 8th, ... are doubted, too: to doubt all would copy a model in
    each step in which a part of it is idle.

    Args:
        guard: The guard's core.
    """

    def __init__(self, guard: GuardCore) -> None:
        self._guard, self._watches = guard, guard.watches
        self._seen = WeakKeyDictionary[Optimizer, _Seen]()  # of those not torch's

    def may_overflow(self, hook: OptimizerHook, is_lagged: bool = False) -> bool:
        """True if a step may make something non-finite although its gradients are not.

        Args:
            hook: That of its optimizer.
            is_lagged: The stats of the step are on their way. A rate that lies on a GPU
                is not read then; else that incurs a CPU-GPU sync.
        """
        largest = max(watch.recorder.largest_gradient for watch in self._watches)
        optimizer = hook.optimizer
        if optimizer is None or not self._guard.clock.is_watched:
            return False
        rate = _largest_rate(optimizer, reads_devices=not is_lagged)
        is_known, is_small = is_torchs(optimizer), largest <= _HARMLESS and rate <= 1.0
        if is_known and is_small:
            return False
        with self._guard.isolation.isolated():
            is_new = not is_known and self._is_new(optimizer, largest)
            is_large = not is_small and may_overflow(optimizer, largest, rate)
            return is_new or is_large
        return False

    def _is_new(self, optimizer: Optimizer, largest: float) -> bool:
        """True if an optimizer has made no step yet of gradients such as these."""
        seen = self._seen.setdefault(optimizer, _Seen())
        num_zero = sum(watch.recorder.num_zero_gradients for watch in self._watches)
        given = (p for group in optimizer.param_groups for p in group["params"])
        num_given = sum(each.grad is not None for each in given)
        return seen.add(largest, num_zero, num_given)


@dataclass
class _Seen:
    """The gradients of an optimizer's steps so far.

    Attributes:
        num_given: Of how many weights at most.
        num_steps: How many steps there were since they were of more than before.
        num_with_zeros: In how many of them a gradient was 0 throughout.
        most_zeros: How many were so in one step at most.
        largest: The largest magnitude of all.
    """

    num_given: int = 0
    num_steps: int = 0
    num_with_zeros: int = 0
    most_zeros: int = 0
    largest: float = 0.0

    def add(self, largest: float, num_zero: int, num_given: int) -> bool:
        """Adds a step; returns True if there was none like it."""
        if num_given > self.num_given:
            self.num_given, self.num_steps = num_given, 0
        self.num_steps += 1
        self.num_with_zeros += num_zero > 0
        is_power = self.num_with_zeros & (self.num_with_zeros - 1) == 0
        is_new = self.num_steps <= _FIRST_STEPS or (num_zero > 0 and is_power)
        is_new |= largest > self.largest or num_zero > self.most_zeros
        self.largest = max(self.largest, largest)
        self.most_zeros = max(self.most_zeros, num_zero)
        return is_new


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
