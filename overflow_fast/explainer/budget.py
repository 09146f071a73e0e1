"""The limits of experiments on a step: forwards, and time.

Time is what the thread computes, whatever else a busy machine does meanwhile.
"""

from __future__ import annotations

import time
from typing import Protocol

# By the clock it may take so many times as long as by the time of the thread: what
# waits for a lock or for other ranks ends, too. Chosen, not measured.
CLOCK_TIMES = 10.0
# A replay that waits ends by then. Ranks that replay together give one another up after
# 300 s: were it more, they would before the one that waits has ended by itself.
_MOST_WAITING = 200.0


def clock_limit(seconds: float) -> float:
    """How long code may take by the clock that may compute for so many seconds."""
    return min(CLOCK_TIMES * seconds, max(seconds, _MOST_WAITING))


class SpentTime:
    """How long this thread has computed since it was made, as far as limits go."""

    def __init__(self) -> None:
        self._begin = time.thread_time(), time.perf_counter()

    @property
    def seconds(self) -> float:
        """The thread's own seconds, or a part of the clock's where that is more."""
        own, clock = self._begin
        waited = (time.perf_counter() - clock) / CLOCK_TIMES
        return max(time.thread_time() - own, waited)


# Of the time of a plain replay, and in seconds, where that is more. Chosen, not
# measured; other ranks wait meanwhile.
STEP_TIMES = 4.0
LEAST_SECONDS = 5.0


class Running(Protocol):
    """A replayer, as far as a budget goes: it counts the forwards that it runs."""

    num_forwards: int


class Budget:
    """The forwards that may be run, and how long this thread may compute meanwhile.

    Args:
        replayer: Runs the step.
        num_forwards: How many may be run from now on.

    Attributes:
        most: How many it may have run in the end.
        step_seconds: How long a plain replay takes; 0 while that is not known.
    """

    def __init__(
        self, replayer: Running, num_forwards: int, step_seconds: float = 0.0
    ) -> None:
        self._replayer, self._spent = replayer, SpentTime()
        self.most = replayer.num_forwards + num_forwards
        self.step_seconds = step_seconds

    @property
    def has_time(self) -> bool:
        """True if the time is not spent."""
        most = max(LEAST_SECONDS, STEP_TIMES * self.step_seconds)
        return self._spent.seconds < most

    def allows(self, num_forwards: int) -> bool:
        """True if so many forwards more may be run."""
        num = self._replayer.num_forwards + num_forwards
        return num <= self.most and self.has_time
