"""The terminal, warnings and loggers, which a replay tells nothing twice."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

_WRITES = ("write", "writelines", "flush")


def _attributes(stream: Any) -> dict[str, Any] | None:
    """The stream's own attributes, without a class's way to hand them on."""
    try:
        found: dict[str, Any] = object.__getattribute__(stream, "__dict__")
    except AttributeError:
        return None  # what it writes goes to a stream that has some, or to a file
    return found


class Quiet:
    """Drops what threads that replay write to the terminal, warn of, or log.

    The streams of the process, what shows warnings and what gives a record to handlers
    are for all threads: each asks which thread it is, as long as one replays. A stream
    does so by a method of its own, whatever name the program has kept it by.
    """

    def __init__(self) -> None:
        self._threads: set[int] = set()
        self._lock = threading.Lock()
        self._show: Any = None
        self._shown_by: tuple[Any, Any] = (None, None)
        self._paused: set[int] = set()
        # The attributes of each stream, those that it has meanwhile, and had before.
        self._streams: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        self._through: list[tuple[io.TextIOWrapper, bool]] = []
        self._call_handlers: tuple[Any, Any] = (None, None)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Is quiet within, in this thread."""
        own = threading.get_ident()
        with self._lock:
            if not self._threads:
                self._begin()
            self._threads.add(own)
        try:
            yield
        finally:
            with self._lock:
                self._threads.remove(own)
                if not self._threads:
                    self._end()

    def pause(self, is_paused: bool) -> None:
        """Drops nothing in this thread meanwhile: what is not of the replay runs."""
        change = self._paused.add if is_paused else self._paused.discard
        change(threading.get_ident())

    def takes(self, stream: Any) -> bool:
        """Drops what this thread gives to a stream's `write` that was kept before.

        It is no name of the stream any more. But a stream of text that keeps nothing
        back hands all of it on to what lies beneath, and so to a method that drops it.

        Returns:
            False for a stream with which that cannot be.
        """
        if not isinstance(stream, io.TextIOWrapper):
            return False
        with self._lock:
            was_through = stream.write_through
            if not was_through:
                self.pause(True)  # what was kept back until now is written
                try:
                    stream.reconfigure(write_through=True)
                except Exception:
                    return False
                finally:
                    self.pause(False)
                self._through.append((stream, was_through))
        return True

    def _begin(self) -> None:
        for stream in terminals().values():
            own = _attributes(stream)
            if own is not None:
                names = [name for name in _WRITES if hasattr(stream, name)]
                mute = {n: self._muted(getattr(stream, n), n == "write") for n in names}
                before = {name: own[name] for name in names if name in own}
                self._streams.append((own, mute, before))
                own.update(mute)
        self._show = vars(warnings)["_showwarnmsg"]
        self._shown_by = _sinks()
        vars(warnings)["_showwarnmsg"] = self._show_warning
        # Not the handlers: `logging` loses sight of them where it is configured anew.
        logger: Any = logging.Logger
        self._call_handlers = logger.callHandlers, self._told(logger.callHandlers)
        logger.callHandlers = self._call_handlers[1]

    def _end(self) -> None:
        for own, mute, before in self._streams:
            for name, method in mute.items():
                if own.get(name) is not method:
                    continue  # somebody has put another there
                if name in before:
                    own[name] = before[name]
                else:
                    del own[name]
        for text, was_through in self._through:
            with contextlib.suppress(Exception):  # it may be closed
                text.reconfigure(write_through=was_through)
        vars(warnings)["_showwarnmsg"] = self._show
        logger: Any = logging.Logger
        call_handlers, told = self._call_handlers
        if logger.callHandlers is told:
            logger.callHandlers = call_handlers
        self._streams, self._through = [], []

    def _muted(self, method: Callable[..., Any], counts: bool) -> Callable[..., Any]:
        """A stream's method that does nothing in threads that replay.

        Args:
            method: The method.
            counts: Whether it returns how much it has written.
        """

        def call(*given: Any, **named: Any) -> Any:
            if not self._is_dropped():
                return method(*given, **named)
            text = given[0] if counts and given else ()
            return getattr(text, "nbytes", len(text)) if counts else None

        return call

    def _is_dropped(self) -> bool:
        own = threading.get_ident()
        return own in self._threads and own not in self._paused

    def _show_warning(self, message: Any) -> None:
        """Shows a warning, but for threads that replay; what these catch is theirs."""
        is_caught = _sinks() != self._shown_by
        if is_caught or not self._is_dropped():
            self._show(message)

    def _told(self, call_handlers: Callable[..., None]) -> Callable[..., None]:
        """`Logger.callHandlers`, which does nothing in threads that replay."""

        def call(logger: logging.Logger, record: logging.LogRecord) -> None:
            if not self._is_dropped():
                call_handlers(logger, record)

        return call


def _sinks() -> tuple[Any, Any]:
    """The functions that show a warning, which `catch_warnings` replaces within it."""
    own = vars(warnings)
    return own["showwarning"], own["_showwarnmsg_impl"]


quiet = Quiet()


def terminals() -> dict[int, Any]:
    """The streams of the process, and what lies beneath them, by their ids."""
    found: dict[int, Any] = {}
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        each: Any = stream
        while each is not None and id(each) not in found:
            found[id(each)] = each
            each = _beneath(each)
    return found


def _beneath(stream: Any) -> Any:
    try:
        return getattr(stream, "buffer", None) or getattr(stream, "raw", None)
    except Exception:  # what lay there was detached
        return None
