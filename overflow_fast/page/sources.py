"""The files and folders that a command line makes a page of."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files.json_text import SCHEMA
from ..record.table import FlightRecord, read_record
from .incidents import Incident, read_incidents


@dataclass(frozen=True)
class Sources:
    """The records and incidents of a page.

    Attributes:
        records: Those of a run, by rank.
        incidents: The incidents, by step.
        damaged: Sentences on evidence that cannot be read.
    """

    records: Sequence[FlightRecord]
    incidents: Sequence[Incident]
    damaged: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """The sources as dicts, lists, texts and numbers: see docs/formats.md."""
        return {
            "schema": SCHEMA,
            "kind": "page",
            "records": [
                {
                    "path": str(record.path),
                    "rank": record.run.get("rank", 0),
                    "steps": sum(step.count for step in record.steps),
                    "last_step": record.steps[-1].last if record.steps else None,
                    "entries": len(record.entries),
                    "is_truncated": record.is_truncated,
                    "num_damaged": record.num_damaged,
                }
                for record in self.records
            ],
            "incidents": [
                {
                    "step": incident.step,
                    "sentence": next(iter(incident.sentences), ""),
                    "cause": incident.explanation.get("cause"),
                    "module": incident.explanation.get("module"),
                    "folder": incident.folder and str(incident.folder),
                }
                for incident in self.incidents
            ],
            "damaged": list(self.damaged),
        }


def read_sources(paths: Iterable[str | os.PathLike[str]]) -> Sources:
    """Reads flight records and folders of evidence.

    Args:
        paths: The files of the ranks' records, and folders of evidence.

    Raises:
        OSError: If a file cannot be read.
        ImportError: If msgspec is not installed.
        ValueError: If a path is of neither kind, or the records are of several runs.
    """
    records, incidents = list[FlightRecord](), list[Incident]()
    damaged = list[str]()
    for path in map(Path, paths):
        if os.path.isdir(path):
            found, cannot = read_incidents(path)
            incidents += found
            damaged += cannot
        else:
            records.append(read_record(path))
    ranks = [record.run.get("rank", 0) for record in records]
    if len(set(ranks)) < len(ranks):
        names = ", ".join(record.path.name for record in records)
        raise ValueError(f"a page is of one run, with one record a rank; got {names}")
    order = sorted(range(len(records)), key=lambda i: ranks[i])
    incidents.sort(key=lambda incident: incident.step)
    return Sources([records[i] for i in order], incidents, damaged)
