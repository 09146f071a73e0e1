"""The guard's code as it runs: isolated from the program."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from threading import RLock
from typing import Any, TypeVar, cast

from .. import _C
from ..base.source_files import drop_own_frames
from .overhead import OverheadTimer
from .ranks.agreement import Agreement
from .report.report import NonFiniteError

_log = logging.getLogger("overflow_fast")
_Argument = TypeVar("_Argument")
_Method = TypeVar("_Method", bound=Callable[..., Any])


class HandlerError(BaseException):
    """Carries what a signal's handler has raised past code that catches an `Exception`.

    Args:
        error: What it has raised, which the program gets.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


# Held where a guard is switched on or off, by one thread at a time.
SWITCHING = RLock()


class ErrorIsolation:
    """Runs the guard's code so that none of its own errors reaches the user.

    Args:
        timer: Measures the time that the guard takes.
        agreement: The ranks that decide together; what their collectives raise is
            raised.

    Attributes:
        num_failures: The number of the guard's own errors so far.
        programs_error: The last error that the user's policy, or a signal's handler
            within the guard's code, has raised, or that a device has kept for whoever
            waits for it; or None.
        on_idle: Called once when the guard's code at hand has ended, and where that was
            called for a step, the step; None for nothing.
        is_in_step: Returns True while an optimizer's step runs.
    """

    def __init__(self, timer: OverheadTimer, agreement: Agreement) -> None:
        self._timer = timer
        self._agreement = agreement
        self.programs_error: Exception | None = None
        self.on_idle: Callable[[], None] | None = None
        self.is_in_step: Callable[[], bool] = lambda: False
        self._failed: set[str] = set()  # whose failure was logged
        self.num_failures = 0

    @property
    def is_busy(self) -> bool:
        """True while the guard's code runs, or a step that it has judged."""
        return self._timer.is_running or self.is_in_step()

    def end(self) -> None:
        """Calls `on_idle`, unless more of the guard's code is to come."""
        if self.on_idle is None or self.is_busy:
            return
        with SWITCHING:
            function, self.on_idle = self.on_idle, None
            if function is not None:
                function()

    def isolated(self, monitor: str = "") -> _Isolated:
        """Suppresses the guard's own errors; hides its code from the user's modes.

        Args:
            monitor: The name of the monitor whose code runs, which may call the models.
        """
        return _Isolated(self, monitor)

    def measured(self) -> _Isolated:
        """Isolates errors, and adds the time to the guard's."""
        return _Isolated(self, "", self._timer)

    def measured_call(
        self, function: Callable[[_Argument], None]
    ) -> Callable[[_Argument], None]:
        """Returns a function that measures another, and isolates its errors."""

        def call(argument: _Argument) -> None:
            with self.measured():
                function(argument)

        return call

    def is_foreign(self, error: Exception) -> bool:
        """Returns True for an error of the user's callable, a device or a group."""
        return error is self.programs_error or error is self._agreement.error

    def suppresses(self, error: BaseException | None, monitor: str = "") -> bool:
        """Notes an error that is the guard's own; returns False for any other."""
        if isinstance(error, NonFiniteError) or not isinstance(error, Exception):
            return False
        if self.is_foreign(error):
            return False
        self.note(error, monitor)
        return True

    def note(self, error: Exception, monitor: str = "") -> None:
        """Counts an error of the guard's own; logs the first one of each monitor."""
        self.num_failures += 1
        if monitor in self._failed:
            return
        self._failed.add(monitor)
        _log.warning(
            "%s failed with the error below. What it was checking was not judged. "
            "Later failures are not logged; `coverage()` counts them.",
            f"The monitor {monitor}" if monitor else "The guard",
            exc_info=error,
        )


class _Isolated:
    """See `ErrorIsolation.isolated()`: several of them are entered in each step.

    Args:
        isolation: Whose it is.
        monitor: The name of the monitor whose code runs.
        timer: Measures the time within; None for none.
    """

    __slots__ = ("_hidden", "_isolation", "_monitor", "_timer", "_unwatched")

    def __init__(
        self,
        isolation: ErrorIsolation,
        monitor: str,
        timer: OverheadTimer | None = None,
    ) -> None:
        self._isolation, self._monitor, self._timer = isolation, monitor, timer
        self._hidden = _C.Hidden()
        self._unwatched = _C.Unwatched() if monitor else None

    def __enter__(self) -> None:
        self._hidden.__enter__()
        if self._unwatched is not None:
            self._unwatched.__enter__()
        if self._timer is not None:
            self._timer.__enter__()

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> bool:
        if self._timer is not None:
            self._timer.__exit__()
        if self._unwatched is not None:
            self._unwatched.__exit__(None, None, None)
        self._hidden.__exit__(None, None, None)
        if self._isolation.on_idle is not None:
            self._isolation.end()
        if isinstance(error, HandlerError):
            self._isolation.programs_error = error.error
            raise error.error from None
        return error is not None and self._isolation.suppresses(error, self._monitor)


def measured(method: _Method) -> _Method:
    """Runs a method of an object with an `_isolation` within its `measured()`.

    It returns None where that has suppressed an error.
    """

    @functools.wraps(method)
    def measured_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._isolation.measured():
            return method(self, *args, **kwargs)

    return cast(_Method, measured_method)


def isolate_errors(method: _Method) -> _Method:
    """Isolates errors in a method of an object with `_parts`; it returns None then."""

    @functools.wraps(method)
    def isolated_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with self._parts.isolation.isolated():
                return method(self, *args, **kwargs)
        except NonFiniteError as error:
            drop_own_frames(error)
            raise error

    return cast(_Method, isolated_method)
