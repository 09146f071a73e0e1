"""Reads the file of a flight record, also while a run writes it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...guard.files.reading import FileError, lines_of, open_regular
from ...guard.files.schema import Lines, head_of
from ...guard.record.record_lines import (
    BEGINNING,
    KIND,
    KINDS,
    RECORD_SCHEMA,
    RecordError,
    StepsLine,
)
from .table import FlightRecord, num_cells

_LINES = Lines(*KINDS)

# A record has nearly all of its entries in nearly all of its steps. A file with one
# wide step among many narrow ones asks for memory out of proportion to its size.
_MAX_SPARSE = 16
_FREE_CELLS = 2**22


def read_record(path: str | os.PathLike[str]) -> FlightRecord:
    """Reads a flight record, also while it is written, or of a process that died.

    Args:
        path: The file that `OverflowGuard(record=...)` has written.

    Returns:
        Its steps, entries and values. Damaged lines are left out, and counted.

    Raises:
        OSError: If the file cannot be read, or is no regular file.
        RecordError: If it is no flight record, one of a newer version, or damaged so
            that nothing in it can be trusted.

    Example:
        >>> record = overflow_fast.read_record("run.ofr")  # doctest: +SKIP
        >>> record.to_dataframe().query("num_nan > 0")  # doctest: +SKIP
    """
    where = Path(path)
    lines, num_damaged, rest = list[Any](), 0, b""
    with open_regular(where) as file:
        for i, text in enumerate(lines_of(file)):
            if text is not None and not text.endswith(b"\n"):
                rest = text
            elif i == 0:
                lines.append(_run_of(text, where))
            else:
                try:
                    line = None if text is None else _LINES.decode(text)
                    num_damaged += text is None
                except FileError:
                    num_damaged += 1
                else:
                    lines += [] if line is None else [line]
    if not lines and not (rest.startswith(BEGINNING) or BEGINNING.startswith(rest)):
        raise _no_record(where)
    _check_size(where, [line for line in lines if isinstance(line, StepsLine)])
    return FlightRecord(where, lines, bool(rest), num_damaged)


def _run_of(text: bytes | None, path: Path) -> Any:
    """The first line of a record.

    Raises:
        RecordError: If it is not that of a record that can be read.
    """
    head = head_of(text)
    if text is None or head.kind != KIND:
        raise _no_record(path)
    try:
        head.check_schema(RECORD_SCHEMA)
        return _LINES.decode(text)
    except FileError as error:
        raise RecordError(f"{path} cannot be read: {error}.") from error


def _check_size(path: Path, steps: Sequence[StepsLine]) -> None:
    """Raises RecordError where a table of the steps would be mostly empty."""
    held = sum(columns.num for line in steps for columns in line.models)
    cells = num_cells(steps)
    if cells > _FREE_CELLS + _MAX_SPARSE * held:
        raise RecordError(
            f"{path} is damaged: its {len(steps)} lines of steps have {held} values, "
            f"of {cells} that its widest lines ask for."
        )


def _no_record(path: Path) -> RecordError:
    return RecordError(f"{path} is no flight record of overflow_fast.")
