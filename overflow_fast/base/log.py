"""The logger `overflow_fast`: each of its lines begins with the package's name."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import traceback
import warnings
from typing import Any

from .text import printable

_PREFIX = "[overflow_fast] "
_formatter = logging.Formatter()


# A text of ours that has lines of its own stands in a line of its own; any other value
# is a part of a line, and cannot end it.
_OF_LINES = re.compile(r"^%s$", re.MULTILINE)
_TEXTS = (str, BaseException, os.PathLike)


def _prefixed(text: str) -> str:
    lines = printable(text, keep="\n\t").rstrip("\n").split("\n")
    return "\n".join(f"{_PREFIX}{line}".rstrip() for line in lines)


def _message(record: logging.LogRecord) -> str:
    if isinstance(record.args, tuple) and not _OF_LINES.search(str(record.msg)):
        record.args = tuple(map(_in_line, record.args))
    return record.getMessage()


def _in_line(value: Any) -> Any:
    return printable(str(value)) if isinstance(value, _TEXTS) else value


def _begin_lines(record: logging.LogRecord) -> bool:
    """Begins each line of a record, and of the traceback that comes with it."""
    try:
        record.msg, record.args = _prefixed(_message(record)), None
    except (TypeError, ValueError, KeyError):
        return True  # logging reports arguments that do not fit the message
    if record.exc_info and not record.exc_text:
        record.exc_text = _prefixed(_formatter.formatException(record.exc_info))
    return True


_DISABLED = (
    "The logger `overflow_fast` is disabled: reports are not seen. dictConfig() and "
    "fileConfig() of logging.config disable all loggers that exist, but for those "
    "that they name, without disable_existing_loggers=False."
)


class _Unfailing(logging.Logger):
    """A logger that an error of a handler, a filter or a record factory does not leave.

    Reports are logged between a decision and what it leads to. That it is disabled is
    warned of once: to configure logging does so to all loggers that exist.
    """

    _is_told = False

    def isEnabledFor(self, level: int) -> bool:
        """True if what is logged at a level is handed on."""
        if self.disabled and level >= logging.WARNING and not self._is_told:
            self._is_told = True
            with contextlib.suppress(Exception):  # a warning may be an error
                warnings.warn(_DISABLED, stacklevel=3)
        return super().isEnabledFor(level)

    def makeRecord(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        """Makes a record; a plain one where the program's factory raises."""
        try:
            return super().makeRecord(*args, **kwargs)
        except Exception:
            _show_error()
            name, level, path, line, message, values, error, *_ = args
            return logging.LogRecord(name, level, path, line, message, values, error)

    def handle(self, record: logging.LogRecord) -> None:
        """Passes a record to the filters and handlers; prints what they raise."""
        try:
            super().handle(record)
        except Exception:
            _show_error()


def _show_error() -> None:
    """Prints the error at hand where logging prints those of its own handlers."""
    if logging.raiseExceptions and sys.stderr is not None:
        with contextlib.suppress(Exception):
            traceback.print_exc()


# This logger alone: how users format and where they write is theirs. It may have been
# made before, and of a class of theirs.
_logger = logging.getLogger("overflow_fast")
_logger.__class__ = type("Logger", (_Unfailing, type(_logger)), {})
_logger.addFilter(_begin_lines)
