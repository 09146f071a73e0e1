"""The choice of the steps to watch: by number, by range, or within a budget."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence


class ScanLevel(enum.IntEnum):
    """The part of a step that is checked."""

    OFF = 0
    GRADIENTS = 1  # enough to protect the weights: no module has a hook
    ALL = 2


# A cost is averaged over about so many steps of its level.
_MEMORY = 8
_MAX_EVERY = 1000


class WatchSchedule:
    """Decides how much of each step is checked.

    Args:
        every: Check one of every so many steps, from `warmup` on.
        warmup: How many steps are left out at first.
        ranges: Only steps in one of these half-open ranges; None for all.
        budget: The share of a step's time that the guard may take on average, or None.
            Gradients are checked in every step if they fit the budget, everything else
            as often as the budget allows.
    """

    def __init__(
        self,
        every: int = 1,
        warmup: int = 0,
        ranges: Sequence[tuple[int, int]] | None = None,
        budget: float | None = None,
    ) -> None:
        self._every = every
        self._warmup = warmup
        self._ranges = ranges
        self._budget = budget
        self._cost: dict[ScanLevel, float] = {}
        self._bare: float | None = None
        self._next_all = 0
        self._next_gradients = 0
        self._is_alarmed = False

    def level(self, step: int) -> ScanLevel:
        """Returns the part of a step to check."""
        if step < self._warmup or (step - self._warmup) % self._every:
            return ScanLevel.OFF
        if self._ranges is not None and not any(a <= step < b for a, b in self._ranges):
            return ScanLevel.OFF
        if self._budget is None or self._is_alarmed or step >= self._next_all:
            return ScanLevel.ALL
        return ScanLevel.GRADIENTS if step >= self._next_gradients else ScanLevel.OFF

    def alarm(self) -> None:
        """Checks the next step in full, whatever it costs."""
        self._is_alarmed = True

    def move(self, steps: int) -> None:
        """Adapts to larger numbers of the steps to come, by so many."""
        self._next_all += steps
        self._next_gradients += steps

    def note(
        self, step: int, level: ScanLevel, guard_seconds: float, step_seconds: float
    ) -> None:
        """Notes the cost of a step, and plans the next ones by it."""
        if level is ScanLevel.ALL:
            self._is_alarmed = False
        if self._budget is None:
            return
        self._bare = _averaged(self._bare, max(step_seconds - guard_seconds, 0.0))
        if level is not ScanLevel.OFF:
            self._cost[level] = _averaged(self._cost.get(level), guard_seconds)
        if level is ScanLevel.ALL:
            self._next_all = step + self._every_for(ScanLevel.ALL)
        if level is not ScanLevel.OFF:
            self._next_gradients = step + self._every_for(ScanLevel.GRADIENTS)

    def _every_for(self, level: ScanLevel) -> int:
        assert self._budget is not None
        allowed = self._budget * (self._bare or 0.0)
        cost = self._cost.get(level)
        if cost is None:
            return 1  # not known yet: check once
        if level is ScanLevel.ALL:
            # Gradients have half of the budget where they fit into it.
            gradients = self._cost.get(ScanLevel.GRADIENTS)
            if gradients is None:
                return 2
            fits = gradients <= allowed / 2
            allowed, cost = (
                (allowed - gradients, cost - gradients) if fits else (allowed / 2, cost)
            )
        elif cost > allowed / 2:
            allowed /= 2
        if cost <= 0:
            return 1
        if allowed <= 0:
            return _MAX_EVERY
        return min(_MAX_EVERY, max(1, math.ceil(cost / allowed)))


def _averaged(known: float | None, new: float) -> float:
    return new if known is None else known + (new - known) / _MEMORY
