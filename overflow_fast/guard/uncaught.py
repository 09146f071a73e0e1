"""Hands exceptions that end the program to guards, before Python prints them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from ..torch_internals.needed import Needing

_Hook = Callable[
    [type[BaseException], BaseException, TracebackType | None],
    Any,
]


class UncaughtListener(Protocol):
    """Receives the exceptions that nobody has caught."""

    def on_raised(self, error: BaseException, ends: bool) -> None:
        """Called before the exception is printed; raises nothing."""


_replaced: dict[Any, Any] = {}  # the hook that was there, by ours


def listen(listener: UncaughtListener) -> None:
    """Calls a listener with each uncaught exception from now on. Holds it weakly.

    The loop between two calls of the guard is no code of the guard's: an exception
    there passes nothing else of it.
    """
    _listeners.add(listener)
    hook = sys.excepthook
    if hook not in _replaced:
        sys.excepthook = _with_listeners(hook)
        _replaced[sys.excepthook] = hook


def stop_listening(listener: UncaughtListener) -> None:
    """Calls a listener no more; after the last one, puts the former hook back.

    Where other code has set a hook since that calls ours, ours only calls the former.
    """
    _listeners.discard(listener)


def _put_back(may_wait: bool) -> None:
    original = _replaced.get(sys.excepthook)
    if original is not None:
        _replaced.clear()
        sys.excepthook = original


_listeners = Needing(_put_back)


def _with_listeners(hook: _Hook) -> _Hook:
    def with_listeners(
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        for listener in list(_listeners):
            listener.on_raised(error, ends=True)
        hook(kind, error, traceback)

    return with_listeners
