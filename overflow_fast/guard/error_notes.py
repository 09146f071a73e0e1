"""Reports in the notes of the program's own exceptions."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from .report.report import NonFiniteError, Report

_log = logging.getLogger("overflow_fast")


@contextlib.contextmanager
def added_to(error: Exception) -> Iterator[None]:
    """Adds a report that is raised within to the program's own exception."""
    try:
        yield
    except NonFiniteError as found:
        add_report(error, found.report)


def add_report(error: Exception, report: Report) -> bool:
    """Adds a report to the program's own exception; logs it where that takes no notes.

    Returns:
        True if it was added.
    """
    try:  # a class may forbid attributes, or have a method of its own that fails
        error.add_note(f"[overflow_fast] {report.answer()}")  # Python 3.11
    except Exception:
        _log.warning("%s", report)
        return False
    return True
