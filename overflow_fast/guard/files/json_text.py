"""JSON that every reader takes: no `NaN`, no `Infinity`.

Written by Python's `json`, whose spaces readers ask for: they tell a file by its first
bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

# The version of all that is written as JSON: the log, report.json, evidence.
SCHEMA = 1
_LINE = json.JSONEncoder(allow_nan=False)


def to_plain(value: Any) -> Any:
    """Converts any nesting to dicts, lists, strings and finite numbers.

    A number that is not finite becomes the string "inf", "-inf" or "nan", a Struct a
    dict, with bytes in base64.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, Struct):
        return to_plain(_fields_of(value))
    if isinstance(value, Mapping):
        return {to_plain(str(key)): to_plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(each) for each in value]
    return to_plain(str(value))


def dumps(value: Any, indent: int | None = None) -> str:
    """Writes JSON in ASCII without control characters; see `to_plain()`.

    Args:
        value: The value.
        indent: The spaces of a level; None for one line.
    """
    text = json.dumps(to_plain(value), allow_nan=False, indent=indent)
    return text.replace("\x7f", "\\u007f")  # the one that json leaves as it is


def line_bytes(line: Any) -> bytes:
    """Writes a line of Structs, or dicts, whose values are plain; see `dumps()`."""
    text = _LINE.encode(_fields_of(line))
    return f"{text}\n".replace("\x7f", "\\u007f").encode()


def _fields_of(value: Any) -> Any:
    """Structs as dicts by the names that their fields have in files, at any depth."""
    return msgspec.to_builtins(value, enc_hook=_as_builtin)


def _as_builtin(value: Any) -> Any:
    """A number or a text of a subclass as one of Python's own, without its code."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float.__float__(value)
    return int.__int__(value) if isinstance(value, int) else str(value)


def parse_object(data: str | bytes) -> dict[str, Any] | None:
    """Parses a JSON object without a schema; None if it is none.

    For files that this process has written, or only asks whose they are.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
