"""The logger `overflow_fast`: each of its lines begins with the package's name."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from ..text import printable

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


# A filter of this logger alone: how users format and where they write is theirs.
logging.getLogger("overflow_fast").addFilter(_begin_lines)
