"""Keeps forwards of other threads out while one of them is run again."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from threading import Condition, get_ident


class Gate:
    """Forwards pass it in any number; a replay, which changes modules, passes alone."""

    def __init__(self) -> None:
        self._condition = Condition()
        self._running: Counter[int] = Counter()  # forwards, by their threads
        self._owner: int | None = None

    def enter(self) -> None:
        """Begins a forward; waits for the end of another thread's replay."""
        own = get_ident()
        if self._owner is None or self._owner == own:  # most forwards do not wait
            with self._condition:
                if self._owner is None or self._owner == own:
                    self._running[own] += 1
                    return
        with self._condition:
            self._condition.wait_for(lambda: self._owner in (None, own))
            self._running[own] += 1

    def leave(self) -> None:
        """Ends a forward of this thread."""
        own = get_ident()
        with self._condition:
            self._running[own] -= 1
            if self._running[own] <= 0:
                del self._running[own]
            if self._owner is not None:
                self._condition.notify_all()

    @contextlib.contextmanager
    def alone(self, seconds: float, beside_running: bool = False) -> Iterator[bool]:
        """Lets no forward of other threads begin, and waits for those that run.

        Args:
            seconds: How long to wait; the forward of another thread may wait for this
                one.
            beside_running: Waits for the replay of another thread alone.

        Yields:
            Whether none of them runs.
        """
        own, end = get_ident(), time.monotonic() + seconds
        with self._condition:
            is_free = self._condition.wait_for(
                lambda: self._owner in (None, own), end - time.monotonic()
            )
            was_owner = self._owner == own
            if is_free:
                self._owner = own
                is_free = beside_running or self._condition.wait_for(
                    lambda: not (self._running.keys() - {own}), end - time.monotonic()
                )
        try:
            yield is_free
        finally:
            with self._condition:
                if self._owner == own and not was_owner:
                    self._owner = None
                    self._condition.notify_all()
