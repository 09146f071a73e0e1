"""The pages of a guard: of its run so far, and of one bad step beside its evidence."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ...guard.record.flight import FlightRecorder
from ...guard.report.report import Report
from ...guard.report.run_identity import RunIdentity
from ..record.reading import read_record
from ..record.table import FlightRecord
from .incidents import Incident
from .render import page_of, write_page


def write_guard_page(
    path: str | os.PathLike[str],
    recorder: FlightRecorder | None,
    report: Report | None,
    gaps: Sequence[str],
) -> Path:
    """Writes a guard's page; see `OverflowGuard.to_html()`.

    Args:
        path: The file; each of several ranks has its own.
        recorder: Keeps the flight record, or None.
        report: The last report, or None.
        gaps: What the guard did not check, in sentences.
    """
    file = None if recorder is None else recorder.file_path
    records = [] if file is None else [read_record(file)]
    incidents = [] if report is None else [Incident.of(report)]
    if recorder is None:
        gaps = [*gaps, "No flight record was kept: `record=` asks for one."]
    return write_page(RunIdentity.begin().path_of_rank(path), records, incidents, gaps)


def evidence_page(
    report: Report, recorder: FlightRecorder | None, num_lines: int
) -> str:
    """Makes the page of a bad step, with the flight record's last lines.

    Args:
        report: The step's report.
        recorder: Keeps the flight record, or None.
        num_lines: How many lines of steps it shows at most.
    """
    record = None if recorder is None else _so_far(recorder, report, num_lines)
    return page_of([] if record is None else [record], [Incident.of(report)])


def _so_far(
    recorder: FlightRecorder, report: Report, num_lines: int
) -> FlightRecord | None:
    """The record's last lines, with the step that a report stops; None if empty."""
    lines = recorder.lines_of(report)
    if recorder.file_path is not None:
        return read_record(recorder.file_path).followed_by(lines).tail(num_lines)
    return FlightRecord(recorder.path, lines, False, 0) if lines else None
