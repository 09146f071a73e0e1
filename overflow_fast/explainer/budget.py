"""What experiments on a step may cost: forwards, and time."""

from __future__ import annotations

from .replayer import Replayer
from .spent_time import SpentTime

# Of the time of a plain replay, and in seconds, where that is more. Chosen, not
# measured; other ranks wait meanwhile.
STEP_TIMES = 4.0
LEAST_SECONDS = 5.0


class Budget:
    """The forwards that may be run, and how long this thread may compute meanwhile.

    Args:
        replayer: Runs the step, and counts the forwards.
        num_forwards: How many may be run from now on.
        step_seconds: How long a plain replay takes; 0 while that is not known.

    Attributes:
        step_seconds: The same.
    """

    def __init__(
        self, replayer: Replayer, num_forwards: int, step_seconds: float = 0.0
    ) -> None:
        self._replayer, self._spent = replayer, SpentTime()
        self.step_seconds = step_seconds
        self.renew(num_forwards)

    def renew(self, num_forwards: int) -> None:
        """Allows so many forwards from now on, within the same time."""
        self._most = self._replayer.num_forwards + num_forwards

    def add(self, num_forwards: int) -> None:
        """Allows so many forwards more."""
        self._most += num_forwards

    def has_time(self) -> bool:
        """True if the time is not spent."""
        most = max(LEAST_SECONDS, STEP_TIMES * self.step_seconds)
        return self._spent.seconds < most

    def allows(self, num_forwards: int) -> bool:
        """True if so many forwards more may be run."""
        num = self._replayer.num_forwards + num_forwards
        return num <= self._most and self.has_time()
