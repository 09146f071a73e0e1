"""The logger `overflow_fast`: each of its lines begins with the package's name."""

from __future__ import annotations

import logging

_PREFIX = "[overflow_fast] "
_formatter = logging.Formatter()


def _prefixed(text: str) -> str:
    lines = text.splitlines() or [""]
    return "\n".join(f"{_PREFIX}{line}".rstrip() for line in lines)


def _begin_lines(record: logging.LogRecord) -> bool:
    """Begins each line of a record, and of the traceback that comes with it."""
    try:
        record.msg, record.args = _prefixed(record.getMessage()), None
    except (TypeError, ValueError, KeyError):
        return True  # logging reports arguments that do not fit the message
    if record.exc_info and not record.exc_text:
        record.exc_text = _prefixed(_formatter.formatException(record.exc_info))
    return True


# A filter of this logger alone: how users format and where they write is theirs.
logging.getLogger("overflow_fast").addFilter(_begin_lines)
