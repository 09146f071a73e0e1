"""Incidents of a log: the bad steps of all ranks, also of runs before this one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..files.reading import FileError, lines_of, open_regular
from .log_lines import RunLine, StepLine
from .log_reading import decoder

# Lines that cannot be of an incident are passed over undecoded.
_OF_INCIDENTS = (b'"kind": "run"', b'"is_clean": false')


@dataclass(frozen=True)
class LoggedIncident:
    """A bad step that stands in a log.

    Attributes:
        run: The run whose line it is.
        time: When it was judged, in seconds since 1970.
        step: The step.
        first: The first bad entry.
        host: The host of the rank that found it.
        device: Its device.
        cause: What the replay found; "" if there was none.
        action: What the guard did.
    """

    run: str
    time: float
    step: int
    first: str
    host: str
    device: str
    cause: str
    action: str = ""

    @property
    def what(self) -> tuple[int, str]:
        """The step and the entry: the same in a later run is the same incident."""
        return self.step, self.first


def read_incidents(path: str | os.PathLike[str]) -> list[LoggedIncident]:
    """Reads the incidents of all ranks and runs from a log and its older files.

    Args:
        path: The guard's `log`; the files of ranks and older ones lie beside it.
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


def _incidents_in(path: Path) -> Iterator[LoggedIncident]:
    known = decoder()
    header: RunLine | None = None
    try:
        with open_regular(path) as file:
            for text in lines_of(file):
                if text is None or not any(each in text for each in _OF_INCIDENTS):
                    continue
                try:
                    line = known.decode(text)
                except FileError:  # half a line, of a process that died
                    continue
                if isinstance(line, RunLine):
                    header = line
                elif isinstance(line, StepLine) and line.first:
                    yield _incident(line, header)
    except OSError:
        return


def _incident(line: StepLine, header: RunLine | None) -> LoggedIncident:
    host = line.host or (header.host if header is not None else None)
    return LoggedIncident(
        *(line.run, line.time, line.step, line.first or "", host or ""),
        *(line.device or "", line.cause or "", line.action or ""),
    )
