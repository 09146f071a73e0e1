"""The page of a guard: its flight record, its last report, what it did not check."""

from __future__ import annotations

import os
from pathlib import Path

from ..page.incident_card import Incident
from ..page.render import write_page
from ..record.reading import read_record
from ..report.run import Run
from .loop import GuardLoop


def write_guard_page(path: str | os.PathLike[str], loop: GuardLoop) -> Path:
    """Writes a guard's page; see `OverflowGuard.to_html()`.

    Args:
        path: The file; each of several ranks has its own.
        loop: The parts of the guard.
    """
    recorder, report = loop.measurements.record, loop.engine.last_report
    file = None if recorder is None else recorder.file_path
    records = [] if file is None else [read_record(file)]
    incidents = [] if report is None else [Incident.of(report)]
    gaps = loop.coverage().gaps()
    if recorder is None:
        gaps.append("No flight record was kept: `record=` asks for one.")
    return write_page(Run.begin().path_of_rank(path), records, incidents, gaps)
