"""The tables of the page, which say in text what its pictures show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..record.table import FlightRecord
from .columns import Column
from .grid import ALL_ZERO, BITS, NONFINITE, NOT_SEEN, Grid, Sheet
from .row_names import name_of
from .strips import STRIPS, strips_of

_MOST_ROWS = 500
_MOST_STEPS = 400
_HEADS = "entry", "class", "kind", "dtype", "least bits", "magnitude", "in step"
_COUNTS = {"num_saturated": "saturated", "num_zero": "zeros"}


class Table(NamedTuple):
    """A table of texts.

    Attributes:
        heads: The names of its columns.
        rows: The texts of its rows.
        remark: What it leaves out, in a sentence, or "".
    """

    heads: list[str]
    rows: list[list[str]]
    remark: str = ""


@dataclass
class _Nearest:
    """Of one entry, over all steps of all records."""

    bits: float = math.inf
    abs_max: float = math.nan
    where: str = "never looked at"
    rank: str = ""
    num_bad: int = 0
    first_bad: str = ""
    counts: dict[str, int] = field(default_factory=dict)


def entry_table(sheet: Sheet, grid: Grid) -> Table:
    """A row for each entry: its least headroom, and where it was not finite."""
    records, nearest = sheet.records, [_Nearest() for _ in sheet.entries]
    for record, rows in zip(records, sheet.rows, strict=True):
        _add(record, [nearest[row] for row in rows])
    worst = sorted(range(len(nearest)), key=lambda i: _need(nearest[i]))[:_MOST_ROWS]
    has_models = any(entry.model for entry in sheet.entries)
    left_out = len(nearest) - len(worst)
    ranks = ["rank"] if len(records) > 1 else []
    counts = [name for name in _COUNTS if name in grid.counts]
    last = "non-finite steps", "first", *(_COUNTS[name] for name in counts)
    return Table(
        [*_HEADS, *ranks, *last],
        [
            [
                name_of(sheet.entries[i], has_models),
                sheet.entries[i].class_name,
                sheet.entries[i].kind.replace("_", " "),
                sheet.entries[i].dtype,
                *_cells(nearest[i], bool(ranks)),
                *(_count(nearest[i].counts.get(name)) for name in counts),
            ]
            for i in sorted(worst)
        ],
        f"{left_out} more entries, which have more headroom, are not listed."
        if left_out
        else "",
    )


def _need(nearest: _Nearest) -> tuple[int, float]:
    return -nearest.num_bad, nearest.bits


def _cells(entry: _Nearest, has_ranks: bool) -> list[str]:
    is_known = not math.isnan(entry.abs_max)
    bits = "all 0" if entry.abs_max == 0 else f"{entry.bits:.1f}"
    return [
        bits if is_known else "",
        f"{entry.abs_max:.4g}" if is_known else "",
        entry.where,
        *([entry.rank] if has_ranks else []),
        str(entry.num_bad or ""),
        entry.first_bad,
    ]


def _count(number: int | None) -> str:
    return "not counted" if number is None else str(number)


def _add(record: FlightRecord, nearest: Sequence[_Nearest]) -> None:
    """Adds what one record knows of entries."""
    high = record.values["abs_max"]
    if not len(record) or not nearest or high is None:
        return
    bad, bits = record.is_nonfinite(), record.headroom_bits()
    is_known = bits.isfinite() | ((bits == math.inf) & ~bad)
    least, at = bits.masked_fill(~is_known, math.inf).min(0)
    # Where all known values were 0 there is no least: the first step of those.
    at = torch.where(least == math.inf, is_known.int().argmax(0), at)
    names = [str(Column(s.first, s.last, [])) for s in record.steps]
    num_bad, first_bad = bad.sum(0).tolist(), bad.int().argmax(0).tolist()
    most = {
        name: [int(number) for number in values.amax(0).tolist()]
        for name in _COUNTS
        if (values := record.values[name]) is not None
    }
    for j, each in enumerate(nearest):
        line = int(at[j])
        is_nearer = math.isnan(each.abs_max) or least[j].item() < each.bits
        if is_known[line, j] and is_nearer:
            each.bits, each.abs_max = least[j].item(), high[line, j].item()
            each.where, each.rank = names[line], str(record.run.get("rank", "?"))
        if num_bad[j]:
            each.where = "" if math.isnan(each.abs_max) else each.where
            each.num_bad = max(each.num_bad, num_bad[j])
            each.first_bad = each.first_bad or names[first_bad[j]]
        for name, numbers in most.items():
            if numbers[j] >= 0:
                each.counts[name] = max(each.counts.get(name, 0), numbers[j])


def step_table(sheet: Sheet) -> Table:
    """A row for each step, or for several: its numbers, and its worst entry."""
    records, grid = sheet.records, sheet.grid(_MOST_STEPS)
    if not grid.columns:
        return Table([], [])
    strips = strips_of(records, grid.columns)
    shown = [name for name in STRIPS if name in strips]
    names = [name_of(entry) for entry in sheet.entries]
    rows = []
    for i, column in enumerate(grid.columns):
        numbers = [_number(strips[name][i]) for name in shown]
        done = _number(strips["skips"][i]), _actions(records, column)
        rows.append([str(column), *numbers, *done, *_worst(grid, i, names)])
    heads = ["step", *(STRIPS[name] for name in shown), "skips", "guard"]
    return Table([*heads, "non-finite", "least bits", "at"], rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _actions(records: Sequence[FlightRecord], column: Column) -> str:
    found = {
        action
        for record, lines in zip(records, column.lines, strict=True)
        for i in lines
        for action in record.steps[i].actions
    }
    return ", ".join(sorted(found))


def _worst(grid: Grid, column: int, names: Sequence[str]) -> list[str]:
    codes = grid.headroom[:, column]
    num_bad = int((codes == NONFINITE).sum())
    if not len(codes):
        return ["", "", ""]
    row = int(codes.argmin())
    code = int(codes[row])
    if code == NOT_SEEN:
        return ["", "not looked at", ""]
    texts = {NONFINITE: "non-finite", ALL_ZERO: "all 0"}
    bits = texts.get(code, f"{code / BITS:.1f}")
    return [str(num_bad or ""), bits, names[row]]
