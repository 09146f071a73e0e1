"""Checks if a file is a log that can be read."""

from __future__ import annotations

from pathlib import Path

from ...guard.files.json_text import SCHEMA
from ...guard.files.reading import FileError, lines_of, open_regular
from ...guard.files.schema import head_of
from ...guard.record.record_lines import KIND as RECORD


class LogError(FileError):
    """A file that cannot be read as a log; says why."""


def check_first(path: Path, line: bytes | None) -> None:
    """Raises LogError if a file's first line is not that of a log that can be read.

    Args:
        path: The file.
        line: Its first line; None if there is none.
    """
    head = head_of(line)
    if head.kind == RECORD:
        raise LogError(f"{path} is a flight record: see `overflow-fast report`.")
    if head.overflow_fast is None:
        raise LogError(f"{path} is no log of overflow_fast.")
    try:
        head.check_schema(SCHEMA)
    except FileError as error:
        raise LogError(f"{path} cannot be read: {error}.") from error


def check_log(path: Path) -> None:
    """Raises LogError or OSError if a file is no log. An empty one may be."""
    with open_regular(path) as file:
        for line in lines_of(file):
            return check_first(path, line)
