"""The data of a bad request's report: whose it is, and what it has left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..report.report_data import ReportData


@dataclass
class RequestData(ReportData):
    """The fields of a `RequestReport`, whose docstring says what each is."""

    forward: int = 0
    num_forwards: int = 1
    token: int | None = None
    ids: list[Any] | None = None
    rows: list[int] | None = None
    num_rows: int = 0
    requests: list[Any] | None = None
    are_requests_known: bool = True
    poisoned: dict[str, list[int] | None] = field(default_factory=dict)
    left_by: str = ""

    def match_rows(self, are_repeated: bool | None = None) -> None:
        """Finds the requests of the rows.

        Args:
            are_repeated: Where there are several rows for each name: True if those of
                a name stand together, False if the names come again and again.
        """
        ids = self.ids
        if ids is None:
            return
        if not self.rows:
            self.requests = [] if self.rows == [] else list(ids)
            self.are_requests_known = self.rows == [] or len(ids) == 1
            return
        times, rest = divmod(self.num_rows, len(ids))
        # A beam search repeats each row, guidance without a classifier the batch.
        repeated = {row // times for row in self.rows} if times and not rest else set()
        together = {row % len(ids) for row in self.rows}
        found = repeated if are_repeated else together
        is_told = are_repeated is not None or repeated == together
        self.are_requests_known = not rest and bool(times) and is_told
        self.are_requests_known |= len(ids) == 1
        places = sorted(found) if self.are_requests_known else range(len(ids))
        self.requests = [ids[place] for place in places if place < len(ids)]

    @property
    def subject(self) -> str:
        """Whose request it is, as the subject of a sentence."""
        names = self.requests if self.requests and self.are_requests_known else self.ids
        return subject_of(self.step, names)


def subject_of(number: int, names: Sequence[object] | None) -> str:
    """A request, as the subject of a sentence: by its names, else by its number."""
    if not names:
        return f"Request {number}"
    word = "Request" if len(names) == 1 else "Requests"
    return f"{word} {', '.join(map(str, names))}"
