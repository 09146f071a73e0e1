"""The time that code has computed, whatever else a busy machine does meanwhile."""

from __future__ import annotations

import time

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
