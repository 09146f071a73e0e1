"""JSON that every reader takes: no `NaN`, no `Infinity`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

# The version of all that is written as JSON: the log, report.json, evidence.
SCHEMA = 1


def to_plain(value: Any) -> Any:
    """Converts any nesting to dicts, lists, strings and finite numbers.

    A number that is not finite becomes the string "inf", "-inf" or "nan".
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, Mapping):
        return {to_plain(str(key)): to_plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(each) for each in value]
    return to_plain(str(value))


def dumps(value: Any) -> str:
    """Writes one line of JSON; see `to_plain()`."""
    return json.dumps(to_plain(value), allow_nan=False)
