"""The warnings that a guard logs: in full for a new place, then ever rarer."""

from __future__ import annotations

import logging
from collections import Counter

from .report import Report

_log = logging.getLogger("overflow_fast")

# 180 bytes each. Alarms of further places are not counted: each is logged in short.
_MAX_PLACES = 10_000


class AlarmLog:
    """Logs the reports of bad steps (logger `overflow_fast`).

    An alarm of a new place is logged in full; of its repetitions, and of bad steps in a
    row, the 2nd, 4th, 8th and so on in short.
    """

    def __init__(self) -> None:
        self._places: Counter[tuple[bool, str, str, str]] = Counter()

    def warn(self, report: Report, num_in_row: int) -> None:
        """Logs the report of a bad step, unless it is a repetition to leave out.

        Args:
            report: The report.
            num_in_row: How many bad steps in a row it ends; 0 for an evaluation.
        """
        first = report.verdict.first
        assert first is not None
        place = report.moment == "evaluation", first.kind, first.fqn, first.label
        if len(self._places) < _MAX_PLACES or place in self._places:
            self._places[place] += 1
        of_place = self._places[place]
        if num_in_row <= 1 and of_place == 1:
            _log.warning("%s", report)
            return
        count, noun = (
            (num_in_row, "non-finite step in a row")
            if num_in_row > 1
            else (of_place, "alarm of this place")
        )
        if count & (count - 1) == 0:
            following = f"the next one logged is the {_ordinal(2 * count)}"
            counted = f"{_ordinal(count)} {noun}; {following}."
            _log.warning("%s", report.short_text(counted))


def _ordinal(count: int) -> str:
    is_teen = count % 100 in (11, 12, 13)
    ending = "th" if is_teen else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
    return f"{count}{ending}"
