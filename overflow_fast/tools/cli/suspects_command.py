"""The command `suspects`: hosts and devices that produce incidents again and again."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...base.text import aligned, printable
from ...guard.files.json_text import dumps
from ...guard.report.causes import NOT_REPRODUCIBLE
from ...guard.report.log_lines import StepLine
from .logged_incidents import LogError, files_of_log, read_incidents
from .subcommand import Commands, add_command, command, fail, reason


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


_Place = tuple[str, str]  # a host and a device
_What = tuple[int, str]


def _what(incident: StepLine) -> _What:
    """The step and the entry: the same in a later run is the same incident."""
    return incident.step, incident.first or ""


def suspects_of(incidents: Iterable[StepLine]) -> Suspects:
    """Counts incidents by host and device.

    An incident counts once, however many ranks have logged it, and however many runs
    have come to it from the same checkpoint.
    """
    found = list(incidents)
    devices = collections.defaultdict[_Place, list[StepLine]](list)
    places = collections.defaultdict[_What, set[_Place]](set)
    for each in found:
        place = each.host or "", each.device or ""
        devices[place].append(each)
        places[_what(each)].add(place)
    rows = []
    for (host, device), own in devices.items():
        whats = set(map(_what, own))
        transient = {_what(each) for each in own if each.cause == NOT_REPRODUCIBLE.name}
        elsewhere = {what for what in whats if len(places[what]) > 1}
        steps = sorted({each.step for each in own})
        last = max(each.time for each in own)
        counts = len(whats), len(transient - elsewhere), len(elsewhere)
        rows.append(Suspect(host, device, *counts, steps, last))
    rows.sort(key=lambda row: (-row.transient, -row.incidents, row.host, row.device))
    return Suspects(rows, len({each.run for each in found}))


@command(after="doctor")
def add_suspects(commands: Commands) -> None:
    """Adds the command `suspects`."""
    parser = add_command(
        commands,
        "suspects",
        _run_suspects,
        "count the incidents of each host and device in the guard's log",
        "suspects guard.jsonl",
        more=": [which node to drain](distributed.md#many-ranks), across restarts",
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        help="the guard's `log`; the files of ranks and older ones lie beside it",
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def _run_suspects(parsed: argparse.Namespace) -> int:
    if not files_of_log(parsed.path):
        return fail(
            f"The log cannot be read: there is no {parsed.path}, nor of a rank."
        )
    try:
        found = suspects_of(read_incidents(parsed.path))
    except (OSError, LogError) as error:
        return fail(f"The log cannot be read: {reason(error)}")
    print(dumps(found.to_dict()) if parsed.json else found)
    return 0
