"""Measures the cost of the guard itself."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..report.report import Cost


class OverheadTimer:
    """Measures a guard's share of the steps, by the host's clock.

    `with timer:` times the guard's own code.

    Args:
        seconds_in_hooks: Returns the seconds that the hooks have taken so far.

    Attributes:
        num_watched: The number of watched steps.
        cost: The cost of the last step, and on average.
    """

    # Bound here: a test that patches time.perf_counter has its patch to itself.
    _now = staticmethod(time.perf_counter)

    def __init__(self, seconds_in_hooks: Callable[[], float]) -> None:
        self._seconds_in_hooks = seconds_in_hooks
        self._depth = 0
        self._begin = 0.0
        self._seconds = 0.0
        self._watched_seconds = 0.0
        self._guard_seconds = 0.0
        self.num_watched = 0
        self.cost = Cost()
        self.restart()

    def restart(self) -> None:
        """Begins a step at this moment."""
        self._step_began = self._now()
        self._hooks_before = self._seconds_in_hooks()
        self._seconds = 0.0

    def leave_out(self, seconds: float) -> None:
        """Subtracts the seconds of a replay, which are no cost of watching."""
        self._seconds -= seconds
        self._step_began += seconds

    def __enter__(self) -> None:
        if self._depth == 0:
            self._begin = self._now()
        self._depth += 1

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._seconds += self._now() - self._begin

    def metrics(self) -> dict[str, float]:
        """Returns the cost of the last step, and the number of watched ones."""
        return {
            "steps_watched_total": self.num_watched,
            "guard_seconds": self.cost.guard_seconds,
            "step_seconds": self.cost.step_seconds,
            "guard_share": self.cost.share,
        }

    def end_step(self, is_watched: bool) -> Cost:
        """Ends the step and returns its cost."""
        step = self._now() - self._step_began
        guard = self._seconds + self._seconds_in_hooks() - self._hooks_before
        if is_watched:
            self.num_watched += 1
            self._watched_seconds += step
            self._guard_seconds += guard
        share = self._guard_seconds / self._watched_seconds if self.num_watched else 0.0
        self.cost = Cost(step, guard, share)
        self.restart()
        return self.cost
