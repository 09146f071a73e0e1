"""Hands exceptions that end the program to guards, before Python prints them.

And those that end a notebook's cell, before IPython prints them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Protocol

from ..base.source_files import notebook_shell
from ..torch_internals.needed import Needing

_Printer = Callable[..., Any]


class UncaughtListener(Protocol):
    """Receives the exceptions that nobody has caught."""

    def on_raised(self, error: BaseException, ends: bool) -> None:
        """Called before the exception is printed; raises nothing."""


_replaced: dict[Any, Any] = {}  # by ours what its owner had: None for its class's


def listen(listener: UncaughtListener) -> None:
    """Calls a listener with each uncaught exception from now on. Holds it weakly.

    The loop between two calls of the guard is no code of the guard's: an exception
    there passes nothing else of it.
    """
    _listeners.add(listener)
    for owner, name, printer in _printers():
        if printer not in _replaced:
            ours = _with_listeners(printer)
            _replaced[ours] = vars(owner).get(name)
            vars(owner)[name] = ours


def stop_listening(listener: UncaughtListener) -> None:
    """Calls a listener no more; after the last one, puts the former hooks back.

    Where other code has set a hook since that calls ours, ours only calls the former.
    """
    _listeners.discard(listener)


def _printers() -> list[tuple[Any, str, _Printer]]:
    """The functions that print exceptions, by owner and name."""
    shell = notebook_shell()
    found = [(sys, "excepthook", sys.excepthook)]
    if callable(getattr(shell, "showtraceback", None)):
        found.append((shell, "showtraceback", shell.showtraceback))
    return found


def _put_back(may_wait: bool) -> None:
    for owner, name, printer in _printers():
        if printer in _replaced:
            vars(owner)[name] = _replaced[printer]
            if _replaced[printer] is None:
                del vars(owner)[name]
    _replaced.clear()


_listeners = Needing(_put_back)


def _with_listeners(printer: _Printer) -> _Printer:
    """Returns a function like one that prints an exception: a given or the present."""

    @functools.wraps(printer)
    def with_listeners(*args: Any, **kwargs: Any) -> Any:
        given = [args, *args, kwargs.get("exc_tuple"), sys.exc_info()]
        errors = (e[1] for e in given if isinstance(e, tuple) and len(e) > 1)
        error = next((each for each in errors if isinstance(each, BaseException)), None)
        for listener in list(_listeners) if error is not None else ():
            listener.on_raised(error, ends=True)
        return printer(*args, **kwargs)

    return with_listeners
