"""Doubts whether a step may overflow although its gradients are finite."""

from __future__ import annotations

from collections.abc import Sequence

from ..isolation import ErrorIsolation
from ..step import StepClock
from ..watching.watch import ModelWatch
from .optimizer_hook import OptimizerHook
from .rates import LearningRates
from .updates import may_overflow

_HARMLESS = 4.0  # a gradient that no update makes too large for float16


class Doubts:
    """Doubts steps by their largest gradient, and by the rates of their optimizers.

    Args:
        watches: The watched models.
        hooks: The optimizers' hooks.
        clock: The step at hand.
        isolation: Isolates the guard's own errors.
    """

    def __init__(
        self,
        watches: Sequence[ModelWatch],
        hooks: Sequence[OptimizerHook],
        clock: StepClock,
        isolation: ErrorIsolation,
    ) -> None:
        self._watches = watches
        self._clock = clock
        self._isolation = isolation
        self._rates = {hook: LearningRates() for hook in hooks}

    def note(self, hook: OptimizerHook) -> None:
        """Takes in the rates of a step. Does not incur a CPU-GPU sync."""
        self._rates[hook].note(hook.optimizer)

    def may_overflow(self, hook: OptimizerHook, is_lagged: bool = False) -> bool:
        """True if a step may overflow although its gradients are finite.

        Args:
            hook: That of its optimizer.
            is_lagged: The stats of the step are on their way; see `LearningRates`.
        """
        largest = max(watch.recorder.largest_gradient for watch in self._watches)
        optimizer = hook.optimizer
        if optimizer is None or not self._clock.is_watched:
            return False
        rate = self._rates[hook].largest(is_lagged)
        if largest <= _HARMLESS and rate <= 1.0:
            return False
        with self._isolation.isolated():
            return may_overflow(optimizer, largest, rate)
        return False
