"""A line of an explanation that takes long: who waits need not look for what hangs."""

from __future__ import annotations

import logging
import time

# If it is less, explanations of usual steps log a line more; if it is more, a program
# that waits for one says nothing for longer. Chosen, not measured.
LONG_SECONDS = 5.0

_log = logging.getLogger("overflow_fast")


class LongExplanation:
    """Begins with the explanation.

    Args:
        budget: How many forwards it may run, and as many replays for remedies.
    """

    def __init__(self, budget: int) -> None:
        self._begin = time.perf_counter()
        self._budget = budget
        self._is_said = False

    def note_replay(self) -> None:
        """Logs a line if the replays before this one took long, the first time."""
        seconds = time.perf_counter() - self._begin
        if self._is_said or seconds < LONG_SECONDS:
            return
        self._is_said = True
        _log.warning(
            "What was non-finite is run again to find why: %.0f s so far. "
            "`budget=` limits it: %d forwards, and as many for remedies.",
            seconds,
            self._budget,
        )
