"""The guard's code as it runs: isolated from the program, and measured."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from threading import RLock
from typing import Any, TypeVar, cast

from .. import _C
from ..base.text import drop_own_frames
from .ranks.agreement import Agreement
from .report.cost import Cost
from .report.report import NonFiniteError
from .watching.watch import ModelWatch

_log = logging.getLogger("overflow_fast")
_Argument = TypeVar("_Argument")
_Method = TypeVar("_Method", bound=Callable[..., Any])


class OverheadTimer:
    """Measures a guard's share of the steps, by the host's clock.

    `with timer:` times the guard's own code.

    Args:
        watches: The watched models, whose hooks take seconds, too.

    Attributes:
        num_watched: The number of watched steps.
        cost: The cost of the last step, and on average.
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
        self.cost = Cost()
        self.restart()

    def restart(self) -> None:
        """Begins a step at this moment."""
        self._step_began = self._begin = self._now()
        self._hooks_before = self._seconds_in_hooks()
        self._seconds = 0.0

    def _seconds_in_hooks(self) -> float:
        return sum(watch.recorder.seconds for watch in self._watches)

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

    def add(self, seconds: float) -> None:
        """Adds seconds of the guard's that were measured elsewhere."""
        self._seconds += seconds

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
        return {
            "steps_watched_total": self.num_watched,
            "guard_seconds": self.cost.guard_seconds,
            "step_seconds": self.cost.step_seconds,
            "guard_share": self.cost.share,
        }

    def end_step(self, is_watched: bool, began: float | None = None) -> Cost:
        """Ends the step and returns its cost; what runs on is of the next one.

        Args:
            is_watched: Whether it counts on average.
            began: When it began, where others run beside it; else the last one's end.
        """
        now = self._now()
        step = now - (self._step_began if began is None else began)
        if self._depth:
            self._seconds += now - self._begin
        guard = self._seconds + self._seconds_in_hooks() - self._hooks_before
        if is_watched:
            self.num_watched += 1
            self._watched_seconds += step
            self._guard_seconds += guard
        share = self._guard_seconds / self._watched_seconds if self.num_watched else 0.0
        self.cost = Cost(step, guard, share)
        self.restart()
        return self.cost


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
