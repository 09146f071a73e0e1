"""Keeps the guard's own errors away from the watched program, and measures its time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from .. import _C
from ..report.report import NonFiniteError
from .overhead import OverheadTimer

_log = logging.getLogger("overflow_fast")


class ErrorIsolation:
    """Runs the guard's code so that none of its own errors reaches the user.

    Args:
        meter: Measures the time that the guard takes.
        is_foreign: Returns True for an error that is not the guard's: of the user's
            callable, or of a collective. Those are raised.

    Attributes:
        num_failures: The number of the guard's own errors so far.
    """

    def __init__(
        self, meter: OverheadTimer, is_foreign: Callable[[Exception], bool]
    ) -> None:
        self._meter = meter
        self._is_foreign = is_foreign
        self.num_failures = 0

    @contextlib.contextmanager
    def isolated(self) -> Iterator[None]:
        """Suppresses the guard's own errors; no mode of the user's sees its code."""
        try:
            with _C.Hidden():
                yield
        except NonFiniteError:
            raise
        except Exception as error:
            if self._is_foreign(error):
                raise
            self.note(error)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Isolates errors, and counts the time as the guard's."""
        with self.isolated(), self._meter:
            yield

    def note(self, error: Exception) -> None:
        """Counts an error of the guard's own; logs the first one."""
        self.num_failures += 1
        if self.num_failures == 1:
            _log.warning(
                "The guard failed, and what it was to judge is not judged. Said "
                "once; see `coverage()`.",
                exc_info=error,
            )
