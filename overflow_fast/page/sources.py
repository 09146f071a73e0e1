"""The files and folders that a command line makes a page of."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ..record.reading import read_record
from ..record.table import FlightRecord
from .incident_card import Incident, read_incidents
from .render import write_page


def write_report(
    paths: Iterable[str | os.PathLike[str]], output: str | os.PathLike[str]
) -> Path:
    """Writes the page of flight records and folders of evidence.

    Args:
        paths: The files of the ranks' records, and folders of evidence.
        output: The page.

    Returns:
        The page's path.

    Raises:
        OSError: If a file cannot be read or written.
        ValueError: If a path is of neither kind, or the records are of several runs.
    """
    records, incidents = list[FlightRecord](), list[Incident]()
    for path in map(Path, paths):
        if path.is_dir():
            incidents += read_incidents(path)
        else:
            records.append(read_record(path))
    ranks = [record.run.get("rank", 0) for record in records]
    if len(set(ranks)) < len(ranks):
        names = ", ".join(record.path.name for record in records)
        raise ValueError(f"a page is of one run, with one record a rank; got {names}")
    order = sorted(range(len(records)), key=lambda i: ranks[i])
    incidents.sort(key=lambda incident: incident.step)
    return write_page(output, [records[i] for i in order], incidents)
