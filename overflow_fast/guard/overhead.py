"""The time that a guard takes of the steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from .report.cost import Cost
from .watching.watch import ModelWatch


class OverheadTimer:
    """Measures a guard's share of the steps, by the host's clock.

    `with timer:` times the guard's own code.

    Args:
        watches: The watched models, whose hooks take seconds, too.

    Attributes:
        num_watched: The number of watched steps.
    """

    # Bound here: a test that patches time.perf_counter has its patch to itself.
    _now = staticmethod(time.perf_counter)

    def __init__(self, watches: Sequence[ModelWatch]) -> None:
        self._watches = watches
        self._depth = 0
        self._seconds = 0.0
        self._watched_seconds = 0.0
        self._guard_seconds = 0.0
        self.num_watched = 0
        self._cost = 0.0, 0.0, 0.0
        self.restart()

    @property
    def cost(self) -> Cost:
        """The cost of the last step, and on average."""
        return Cost(*self._cost)

    def restart(self) -> None:
        """Begins a step at this moment."""
        self._step_began = self._begin = self._now()
        self._hooks_before = self._seconds_in_hooks()
        self._seconds = 0.0

    def _seconds_in_hooks(self) -> float:
        return sum([watch.recorder.seconds for watch in self._watches])

    def leave_out(self, seconds: float) -> None:
        """Subtracts the seconds of a replay, which are no cost of watching."""
        self._seconds -= seconds
        self._step_began += seconds

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Leaves out the time within: a step is run again."""
        begin = self._now()
        try:
            yield
        finally:
            self.leave_out(self._now() - begin)

    @property
    def is_running(self) -> bool:
        """True while the guard's own code runs."""
        return self._depth > 0

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
        step, guard, share = self._cost
        return {
            "steps_watched_total": self.num_watched,
            "guard_seconds": guard,
            "step_seconds": step,
            "guard_share": share,
        }

    def end_step(
        self, is_watched: bool, began: float | None = None, seconds: float = 0.0
    ) -> None:
        """Ends the step; what runs on is of the next one.

        Args:
            is_watched: Whether it counts on average.
            began: When it began, where others run beside it; else the last one's end.
            seconds: Those of the guard's that were measured elsewhere.
        """
        now = self._now()
        step = now - (self._step_began if began is None else began)
        if self._depth:
            self._seconds += now - self._begin
        guard = self._seconds + self._seconds_in_hooks() - self._hooks_before + seconds
        if is_watched:
            self.num_watched += 1
            self._watched_seconds += step
            self._guard_seconds += guard
        share = self._guard_seconds / self._watched_seconds if self.num_watched else 0.0
        self._cost = step, guard, share
        self.restart()
