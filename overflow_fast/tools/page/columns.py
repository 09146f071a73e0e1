"""Columns of the page's pictures: which steps of which records share one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...guard.record.record_step import RecordStep
from ..record.table import FlightRecord


@dataclass(frozen=True)
class Column:
    """Steps that are drawn as one.

    Attributes:
        first: The number of the first step.
        last: The number of the last one.
        lines: For each record the indices of its steps (`FlightRecord.steps`).
    """

    first: int
    last: int
    lines: list[list[int]]

    def __str__(self) -> str:
        """The step's number, or those of the first and the last one."""
        if self.first == self.last:
            return str(self.first)
        return f"{self.first} to {self.last}"


def columns_of(records: Sequence[FlightRecord]) -> list[Column]:
    """Divides the steps of records into columns, the oldest first.

    Steps that one record keeps in one line are not divided.

    Args:
        records: The records, of one run or of its ranks.
    """
    if len(records) == 1:
        # In the order of the file: a run may count its steps from 0 again.
        steps = enumerate(records[0].steps)
        return [Column(s.first, s.last, [[i]]) for i, s in steps]
    lines = [
        (step, which, i)
        for which, record in enumerate(records)
        for i, step in enumerate(record.steps)
    ]
    lines.sort(key=lambda line: (line[0].first, line[0].last))
    return _overlapping(lines, len(records))


def _overlapping(
    lines: Sequence[tuple[RecordStep, int, int]], num_records: int
) -> list[Column]:
    columns = list[Column]()
    for step, which, i in lines:
        first, last = step.first, step.last
        if columns and first <= columns[-1].last:
            before = columns.pop()
            column = Column(before.first, max(before.last, last), before.lines)
        else:
            column = Column(first, last, [[] for _ in range(num_records)])
        column.lines[which].append(i)
        columns.append(column)
    return columns


def downsampled(columns: list[Column], most: int) -> list[Column]:
    """Joins columns if there are too many.

    The newest half keep columns of their own; older ones share the rest evenly.

    Args:
        columns: The columns, the oldest first.
        most: How many there may be, at least 2.
    """
    if len(columns) <= most:
        return columns
    num_new = most // 2
    old, new = columns[: len(columns) - num_new], columns[len(columns) - num_new :]
    size = -(-len(old) // (most - num_new))
    return [_joined(old[i : i + size]) for i in range(0, len(old), size)] + new


def _joined(columns: Sequence[Column]) -> Column:
    lines = [
        [i for each in several for i in each]
        for several in zip(*(column.lines for column in columns), strict=True)
    ]
    first = min(column.first for column in columns)
    return Column(first, max(column.last for column in columns), lines)
