"""The share of a run's time that running code again unasked may take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from time import perf_counter

# Chosen, not measured. With more, a program that meets bad values all the time is
# noticeably slower; with less, the later ones of a few are not explained.
FREE_SECONDS, SHARE = 30.0, 0.1


class TimeShare:
    """Limits the time that is spent to some seconds and a share of the run's."""

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
