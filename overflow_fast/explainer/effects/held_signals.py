"""The program's signal handlers, which wait while its state is that of a replay.

Python calls them in the main thread, wherever that stands. Within a replay they would
find models as the replay has them, under its modes, and would be taken for the code
that is run again, and ended. So handlers of Python that run there only note the signal,
and are called once the state of the program is in place again: each with its effects,
once for each time that Python would have called it, in order.

Ctrl+C is not held back where it raises `KeyboardInterrupt`. The system's own handler,
its flags, and the descriptor of `signal.set_wakeup_fd()` are left alone. A replay in
another thread holds nothing back: no handler runs there.
"""

from __future__ import annotations

import collections
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ... import _C
from ...guard.isolation import HandlerError

_Handler = Callable[[int, Any], object]


class HeldSignals:
    """Holds the handlers back between `hold()` and `release()`; calls may be nested."""

    def __init__(self) -> None:
        self._depth = 0
        self._handlers: dict[int, _Handler] = {}
        # What is to be called: a handler may set another one of its signal.
        self._waiting: collections.deque[Callable[[], object]] = collections.deque()

    def hold(self) -> None:
        """Holds them back from here on, if this is the thread that runs them."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth += 1
        if self._depth > 1:
            return
        try:
            for number in signal.valid_signals():
                handler: Any = signal.getsignal(number)
                is_plain = (
                    handler is signal.default_int_handler or self._note == handler
                )
                if callable(handler) and not is_plain:
                    self._handlers[number] = handler
                    _C.set_signal_handler(number, self._note)
        except Exception as error:  # of a handler that runs before it is replaced
            self.release()
            raise HandlerError(error) from None
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Puts the handlers back, and calls those that have waited.

        Raises:
            HandlerError: If one of them has raised an `Exception`.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth:
            return
        try:
            self._put_back(list(self._handlers.items()))
        finally:
            try:
                self._call_waiting()
            except Exception as error:
                raise HandlerError(error) from None

    def _put_back(self, left: list[tuple[int, _Handler]]) -> None:
        try:
            while left:
                _C.set_signal_handler(*left[-1])
                left.pop()
            self._handlers = {}
        finally:
            if left:  # Ctrl+C came: the others are put back all the same
                self._put_back(left)

    @property
    def are_due(self) -> bool:
        """True if some have waited, and `release()` would call them."""
        is_main = threading.current_thread() is threading.main_thread()
        return is_main and self._depth == 1 and bool(self._waiting)

    def _note(self, number: int, frame: Any) -> None:
        handler = self._handlers[number]
        self._waiting.append(lambda: handler(number, sys._getframe(1)))

    def _call_waiting(self) -> None:
        try:
            while self._waiting:
                self._waiting.popleft()()
        finally:
            if self._waiting:  # one has raised: the others are called all the same
                self._call_waiting()


held_signals = HeldSignals()


@contextlib.contextmanager
def as_raised() -> Iterator[None]:
    """Raises what a handler has raised within, as it was."""
    try:
        yield
    except HandlerError as raised:
        error = raised.error
    else:
        return
    raise error
