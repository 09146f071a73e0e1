"""Reads the file of a flight record."""

from __future__ import annotations

import json
import os
from pathlib import Path

from .record_lines import BEGINNING, KIND, RECORD_SCHEMA, Line, RecordError
from .table import FlightRecord


def read_record(path: str | os.PathLike[str]) -> FlightRecord:
    """Reads a flight record, also while it is written, or of a process that died.

    Args:
        path: The file that `OverflowGuard(record=...)` has written.

    Returns:
        Its steps, entries and values.

    Raises:
        OSError: If the file cannot be read.
        RecordError: If it is no flight record, or one of a newer version.

    Example:
        >>> record = overflow_fast.read_record("run.ofr")  # doctest: +SKIP
        >>> record.to_dataframe().query("num_nan > 0")  # doctest: +SKIP
    """
    where = Path(path)
    *whole, rest = where.read_bytes().split(b"\n")
    lines: list[Line] = []
    for text in whole:
        parsed = _parsed(text)
        if not lines:
            _check(parsed, where)
        if parsed is not None:
            lines.append(parsed)
    if not whole and not (rest.startswith(BEGINNING) or BEGINNING.startswith(rest)):
        _check(None, where)
    num_damaged = len(whole) - len(lines)
    return FlightRecord(where, lines, bool(rest), num_damaged)


def _parsed(text: bytes) -> Line | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _check(first: Line | None, path: Path) -> None:
    """Raises RecordError if a first line is not that of a record that can be read."""
    if first is None or first.get("kind") != KIND:
        raise RecordError(f"{path} is no flight record of overflow_fast.")
    schema = first.get("schema")
    if not isinstance(schema, int) or schema > RECORD_SCHEMA:
        raise RecordError(
            f"{path} has schema {schema}, written by overflow_fast "
            f"{first.get('overflow_fast')}; this one reads schemas up to "
            f"{RECORD_SCHEMA}: run `pip install -U overflow_fast`."
        )
