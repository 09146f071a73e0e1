"""Hosts and devices that produce incidents again and again, from the log."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...scanner.text import aligned, printable
from ..files.reading import FileError, lines_of, open_regular
from .causes import NOT_REPRODUCIBLE
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


@dataclass(frozen=True)
class Suspect:
    """A device, and the incidents that it has produced.

    Attributes:
        host: The name of its host.
        device: The device.
        incidents: How many different incidents there were.
        transient: How many of them a replay did not give again: a sign of hardware.
        elsewhere: How many of them other devices had in the same step, too: a sign of
            data or code.
        steps: The steps, in order.
        last: When the last one was, in seconds since 1970.
    """

    host: str
    device: str
    incidents: int
    transient: int
    elsewhere: int
    steps: list[int]
    last: float


@dataclass(frozen=True)
class Suspects:
    """A table of suspects, the worst first. `str()` of it is the table.

    Attributes:
        rows: The suspects.
        runs: How many runs there were with incidents.
    """

    rows: list[Suspect]
    runs: int

    def __str__(self) -> str:
        """Writes a line for each device."""
        if not self.rows:
            return "No incident is in the log."
        table = [["host", "device", "incidents", "transient", "elsewhere", "last"]]
        for each in self.rows:
            last = datetime.datetime.fromtimestamp(each.last, datetime.timezone.utc)
            counts = each.incidents, each.transient, each.elsewhere
            when = f"step {each.steps[-1]}, {last:%Y-%m-%d %H:%M} UTC"
            cells = [each.host, each.device, *map(str, counts), when]
            table.append([printable(cell) for cell in cells])
        return "\n".join(aligned(table))

    def to_dict(self) -> dict[str, Any]:
        """Returns the table as plain data."""
        return dataclasses.asdict(self)


def suspects_of(incidents: Iterable[LoggedIncident]) -> Suspects:
    """Counts incidents by host and device.

    An incident counts once, however many ranks have logged it, and however many runs
    have come to it from the same checkpoint.
    """
    found = list(incidents)
    devices: dict[tuple[str, str], list[LoggedIncident]] = {}
    places = collections.defaultdict[tuple[int, str], set[tuple[str, str]]](set)
    for each in found:
        devices.setdefault((each.host, each.device), []).append(each)
        places[each.what].add((each.host, each.device))
    rows = []
    for (host, device), own in devices.items():
        whats = {each.what for each in own}
        transient = {each.what for each in own if each.cause == NOT_REPRODUCIBLE.name}
        elsewhere = {what for what in whats if len(places[what]) > 1}
        steps = sorted({each.step for each in own})
        last = max(each.time for each in own)
        counts = len(whats), len(transient - elsewhere), len(elsewhere)
        rows.append(Suspect(host, device, *counts, steps, last))
    rows.sort(key=lambda row: (-row.transient, -row.incidents, row.host, row.device))
    return Suspects(rows, len({each.run for each in found}))


def read_incidents(path: str | os.PathLike[str]) -> list[LoggedIncident]:
    """Reads the incidents of all ranks and runs from a log and its older files.

    Args:
        path: The guard's `log`; the files of ranks and older ones lie beside it.
    """
    whole = Path(path)
    stem, suffix = re.escape(whole.stem), re.escape(whole.suffix)
    is_log = re.compile(rf"{stem}(\.rank\d+)?{suffix}(\.\d+)?")
    if not whole.parent.is_dir():
        return []
    files = [each for each in whole.parent.iterdir() if is_log.fullmatch(each.name)]
    return [each for file in sorted(files) for each in _incidents_in(file)]


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
