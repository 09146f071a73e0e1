"""Incidents of a log: the bad steps of all ranks, also of runs before this one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ...guard.files.json_text import SCHEMA
from ...guard.files.reading import FileError, lines_of, open_regular
from ...guard.files.schema import Lines, head_of
from ...guard.record.record_lines import KIND as RECORD
from ...guard.report.log_lines import KINDS, RunLine, StepLine

_LINES = Lines(*KINDS)
# Lines that cannot be of an incident are passed over undecoded.
_OF_INCIDENTS = (b'"kind": "run"', b'"is_clean": false')


class LogError(FileError):
    """A file that cannot be read as a log; says why."""


def read_incidents(path: str | os.PathLike[str]) -> list[StepLine]:
    """Reads the bad steps of all ranks and runs from a log and its older files.

    A line that lacks the host of its step gets that of its run.

    Args:
        path: The guard's `log`; the files of ranks and older ones lie beside it.

    Raises:
        LogError: If one of the files is no log. An empty one may be.
        OSError: If one cannot be read.
    """
    return [each for file in files_of_log(path) for each in _incidents_in(file)]


def files_of_log(path: str | os.PathLike[str]) -> list[Path]:
    """Lists the files of all ranks of a log, and its older ones.

    Args:
        path: The guard's `log`.
    """
    whole = Path(path)
    stem, suffix = re.escape(whole.stem), re.escape(whole.suffix)
    is_log = re.compile(rf"{stem}(\.rank\d+)?{suffix}(\.\d+)?")
    if not whole.parent.is_dir():
        return []
    return sorted(
        each for each in whole.parent.iterdir() if is_log.fullmatch(each.name)
    )


def _incidents_in(path: Path) -> Iterator[StepLine]:
    header: RunLine | None = None
    with open_regular(path) as file:
        for i, text in enumerate(lines_of(file)):
            if i == 0:
                _check_first(path, text)
            if text is None or not any(each in text for each in _OF_INCIDENTS):
                continue
            try:
                line = _LINES.decode(text)
            except FileError:  # half a line, of a process that died
                continue
            if isinstance(line, RunLine):
                header = line
            elif isinstance(line, StepLine) and line.first:
                if header is not None and not line.host:
                    line.host = header.host or None
                yield line


def _check_first(path: Path, line: bytes | None) -> None:
    """Raises LogError if a file's first line is not that of a log that can be read."""
    head = head_of(line)
    if head.kind == RECORD:
        raise LogError(f"{path} is a flight record: see `overflow-fast report`.")
    if head.overflow_fast is None:
        raise LogError(f"{path} is no log of overflow_fast.")
    try:
        head.check_schema(SCHEMA)
    except FileError as error:
        raise LogError(f"{path} cannot be read: {error}.") from error
