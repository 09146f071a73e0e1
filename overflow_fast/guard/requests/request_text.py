"""The words of a bad request's report."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...base.text import printable
from ..report.entry_words import what_of
from ..report.wording import ReportText
from .request_data import RequestData

_FEW = 4  # in a sentence; chosen
_ALIKE = re.compile(r"\d+|(?<=\.)(?:keys?|values?)\b")  # layers of a cache


class RequestText(ReportText):
    """The sentences of the report of a request.

    Args:
        report: The report.
    """

    report: RequestData
    unit = "request"

    def __init__(self, report: RequestData) -> None:
        super().__init__(report)

    def event(self) -> str:
        """The request, the bad values and their place, and the rows of the output."""
        assert self.verdict.first is not None
        report = self.report
        number = f", forward {report.forward} of {report.num_forwards} (from 0)"
        where = number if report.num_forwards > 1 else ""
        where = where if report.token is None else f", token {report.token}"
        what = what_of(self.verdict.first)
        return f"{report.subject}{where}: {what}{self._rows()}"

    def _rows(self) -> str:
        rows, size = self.report.rows, self.report.num_rows
        if rows is None:
            return ""
        if not rows:
            return "; what was returned is finite"
        if len(rows) == size:
            return "; no row of the output is finite" * (size > 1)
        are = "is" if len(rows) == 1 else "are"
        return (
            f"; {_numbered(rows)} of {size} (from 0) of the output {are} not finite, "
            "the others are"
        )

    def line(self) -> str:
        """The headline in one line; where nothing was run again, why that is so."""
        notes = self.report.notes * (self.report.explanation is None)
        return printable(" ".join([self.headline(), *notes]))

    def _outcome(self) -> list[str]:
        report = self.report
        raised = f"The program's own code raised {report.raised} in it."
        told = [raised] if report.raised else []
        if report.requests and not report.are_requests_known:
            told.append("Which of these requests it is of is not known.")
        if report.left_by:
            told.append(f"{report.left_by} has left it there.")
        return told

    def _reasons(self) -> list[str]:
        return [*super()._reasons(), *self._left()]

    def _left(self) -> list[str]:
        """Names what the request has left in state, and in what it has returned."""
        left = self.report.poisoned
        returned = [name for name in left if name.startswith("output")]
        kept = _grouped({k: v for k, v in left.items() if k not in returned})
        result = _grouped({name: left[name] for name in returned})
        texts = []
        if kept:
            texts += [
                f"It has left {kept} non-finite: clear that before it is used again."
            ]
        if result:
            texts += [
                f"What it returned holds {result} non-finite: do not go on from it."
            ]
        return texts

    def _details(self) -> list[str]:
        own = super()._details()
        return [each for each in own if not each.startswith("The guard takes")]


def _grouped(left: Mapping[str, list[int] | None]) -> str:
    """Lists places with their rows; the layers of one cache once."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, rows in left.items():
        where = "" if rows is None else f" in {_numbered(rows)}"
        groups.setdefault((_ALIKE.sub("*", name), where), []).append(name)
    texts = [
        f"`{names[0]}`{f' and {len(names) - 1} alike' * (len(names) > 1)}{where}"
        for (_, where), names in list(groups.items())[:_FEW]
    ]
    return ", ".join(texts) + " and others" * (len(groups) > _FEW)


def _numbered(rows: list[int]) -> str:
    shown = ", ".join(map(str, rows[:_FEW])) + " ..." * (len(rows) > _FEW)
    return f"{'row' if len(rows) == 1 else 'rows'} {shown}"
