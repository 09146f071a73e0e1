"""The terminal, warnings and loggers, which a replay tells nothing twice."""

from __future__ import annotations

import collections
import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

_MOST_USED = 64  # streams that other code may still hold; chosen


class _Quieted:
    """A stream into which some threads write nothing."""

    def __init__(self, stream: Any, threads: dict[int, int]) -> None:
        self._stream, self._threads = stream, threads

    def write(self, text: str) -> int:
        """Writes, but for threads that replay."""
        if threading.get_ident() in self._threads:
            return len(text)
        return int(self._stream.write(text))

    def writelines(self, lines: Any) -> None:
        """Writes lines, but for threads that replay."""
        for each in lines:
            self.write(each)

    def flush(self) -> None:
        """Flushes, but for threads that replay."""
        if threading.get_ident() not in self._threads:
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Quiet:
    """Drops what threads that replay write to the terminal, warn of, or log.

    The streams of `sys`, what shows warnings and the handlers of `logging` are those of
    the process: each asks which thread it is, as long as one replays.
    """

    def __init__(self) -> None:
        self._threads: dict[int, int] = {}
        self._lock = threading.Lock()
        self._show: Any = None
        self._shown_by: tuple[Any, Any] = (None, None)
        self._streams: dict[str, _Quieted] = {}
        self._handlers: list[logging.Handler] = []
        # `print` of another thread holds no reference of its own to the stream that it
        # has begun to write to: the last ones stay alive.
        self._used: collections.deque[_Quieted] = collections.deque(maxlen=_MOST_USED)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Is quiet within, in this thread."""
        own = threading.get_ident()
        with self._lock:
            self._threads[own] = self._threads.get(own, 0) + 1
            if not self._streams and not self._handlers:
                self._begin()
        try:
            yield
        finally:
            with self._lock:
                self._threads[own] -= 1
                if not self._threads[own]:
                    del self._threads[own]
                if not self._threads:
                    self._end()

    def _begin(self) -> None:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None:
                self._streams[name] = _Quieted(stream, self._threads)
                self._used.append(self._streams[name])
                setattr(sys, name, self._streams[name])
        self._show = vars(warnings)["_showwarnmsg"]
        self._shown_by = _sinks()
        vars(warnings)["_showwarnmsg"] = self._show_warning
        handlers: Any = vars(logging)["_handlerList"]  # weak references
        found = [reference() for reference in handlers]
        self._handlers = [each for each in found if each is not None]
        for handler in self._handlers:
            handler.addFilter(self._is_told)

    def _end(self) -> None:
        for name, stream in self._streams.items():
            if getattr(sys, name) is stream:  # else somebody has put another there
                setattr(sys, name, stream._stream)
        vars(warnings)["_showwarnmsg"] = self._show
        for handler in self._handlers:
            handler.removeFilter(self._is_told)
        self._streams, self._handlers = {}, []

    def _show_warning(self, message: Any) -> None:
        """Shows a warning, but for threads that replay; what these catch is theirs."""
        is_caught = _sinks() != self._shown_by
        if is_caught or threading.get_ident() not in self._threads:
            self._show(message)

    def _is_told(self, record: logging.LogRecord) -> bool:
        return threading.get_ident() not in self._threads


def _sinks() -> tuple[Any, Any]:
    """The functions that show a warning, which `catch_warnings` replaces within it."""
    own = vars(warnings)
    return own["showwarning"], own["_showwarnmsg_impl"]


quiet = Quiet()


def terminals() -> set[int]:
    """The ids of the streams of the process, and of what lies beneath them."""
    found: set[int] = set()
    for each in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        stream: Any = each._stream if isinstance(each, _Quieted) else each
        while stream is not None and id(stream) not in found:
            found.add(id(stream))
            stream = getattr(stream, "buffer", None) or getattr(stream, "raw", None)
    return found
