"""Reads a log: its first line, and lines of kinds that this version does not know."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Struct

from ...guard.files.fields import Index, StepNumber, Time, meaning
from ...guard.files.json_text import SCHEMA
from ...guard.files.reading import FileError, lines_of, open_regular
from ...guard.files.schema import Lines, head_of
from ...guard.record.record_lines import KIND as RECORD
from ...guard.report.log_lines import KINDS


class LogError(FileError):
    """A file that cannot be read as a log; says why."""


class OtherLine(Struct, kw_only=True):
    """A line of a kind that this version does not know."""

    kind: Annotated[str, meaning("its kind")]
    run: Annotated[str, meaning("the id of the run")] = ""
    time: Annotated[Time, meaning("when it was written")] = 0.0
    rank: Annotated[Index | None, meaning("the rank")] = None
    step: Annotated[StepNumber | None, meaning("the number of the step")] = None
    action: Annotated[str | None, meaning("what was done")] = None
    is_clean: Annotated[bool | None, meaning("false if the step was not finite")] = None


def decoder() -> Lines:
    """Returns what decodes the lines."""
    return Lines(*KINDS, other=OtherLine)


def check_first(path: Path, line: bytes | None) -> None:
    """Raises LogError if a file's first line is not that of a log that can be read.

    Args:
        path: The file.
        line: Its first line; None if there is none.
    """
    head = head_of(line)
    if head.kind == RECORD:
        raise LogError(
            f"{path} is a flight record: see `overflow-fast watch` and "
            "`report`."
        )
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
