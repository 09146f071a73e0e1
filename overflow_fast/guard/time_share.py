"""The share of a run's time that running code again unasked may take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from time import perf_counter

FREE_SECONDS, SHARE = 30.0, 0.1


class TimeShare:
    """What was spent so far, of some seconds and a share of the time since the first.

    A run that meets bad values again and again would else run its steps twice.
    """

    def __init__(self) -> None:
        self._began, self._seconds = perf_counter(), 0.0

    @property
    def is_spent(self) -> bool:
        """True if nothing is left."""
        return self._seconds > FREE_SECONDS + SHARE * (perf_counter() - self._began)

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Spends the time within."""
        begin = perf_counter()
        try:
            yield
        finally:
            self._seconds += perf_counter() - begin
