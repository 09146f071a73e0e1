"""The numbers of the heatmap: a code for each entry in each column of steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..record.record_types import RecordEntry
from ..record.table import FlightRecord
from .columns import Column, columns_of

# Codes of headroom, so that the least of several is what they have in common.
BITS = 16  # codes a bit: a magnitude is known to 2.2 %
NONFINITE, ALL_ZERO, NOT_SEEN = -32768, 32766, 32767
# Codes of counts, where the most of several counts: 0 not counted, 1 none, then log2.
NOT_COUNTED, NONE = 0, 1
_COUNTS_A_DOUBLING = 4

Key = tuple[int, str, str, str, int]


@dataclass
class Grid:
    """Entries by columns of steps, over all records.

    Attributes:
        entries: The rows, in the order of execution.
        columns: The columns, the oldest first.
        headroom: int16 of shape `[entries, columns]`: the least of all records.
        counts: uint8 of that shape by "num_saturated" and "num_zero": the most; only
            what was counted.
        by_record: Headroom of each record alone.
    """

    entries: list[RecordEntry]
    columns: list[Column]
    headroom: torch.Tensor
    counts: dict[str, torch.Tensor]
    by_record: list[torch.Tensor]


def make_grid(records: Sequence[FlightRecord], most_columns: int) -> Grid:
    """Gathers records into a grid.

    Args:
        records: The records, of one run or of its ranks.
        most_columns: How many columns it may have, at least 2.
    """
    columns = columns_of(records, most_columns)
    rows = rows_of(records)
    shape = len(rows), len(columns)
    by_record, counts = [], dict[str, torch.Tensor]()
    for which, record in enumerate(records):
        at = [rows[key] for key in keys_of(record)], [c.lines[which] for c in columns]
        codes = _gathered(_headroom_codes(record), *at, shape, NOT_SEEN)
        by_record.append(codes.short())
        for name in ("num_saturated", "num_zero"):
            values = record.values[name]
            if values is None:
                continue
            found = _gathered(_count_codes(values), *at, shape, NOT_COUNTED).byte()
            counts[name] = torch.maximum(counts.get(name, found), found)
    empty = torch.full(shape, NOT_SEEN, dtype=torch.int16, device="cpu")
    headroom = torch.stack(by_record).amin(0) if by_record else empty
    return Grid(entries_of(records), columns, headroom, counts, by_record)


def keys_of(record: FlightRecord) -> list[Key]:
    """The keys of a record's entries, by which those of other ranks are the same."""
    seen: Counter[tuple[int, str, str, str]] = Counter()
    keys = list[Key]()
    for each in record.entries:
        name = each.model, each.module, each.kind, each.label
        keys.append((*name, seen[name]))
        seen[name] += 1
    return keys


def rows_of(records: Sequence[FlightRecord]) -> dict[Key, int]:
    """The row of each entry that any of the records has."""
    rows = dict[Key, int]()
    for record in records:
        for key in keys_of(record):
            rows.setdefault(key, len(rows))
    return rows


def entries_of(records: Sequence[FlightRecord]) -> list[RecordEntry]:
    """The entries of all records, each once."""
    found = dict[Key, RecordEntry]()
    for record in records:
        for key, entry in zip(keys_of(record), record.entries, strict=True):
            found.setdefault(key, entry)
    return list(found.values())


def _headroom_codes(record: FlightRecord) -> torch.Tensor:
    bits = record.headroom_bits()
    codes = (bits.clamp(0, ALL_ZERO / BITS) * BITS).round()
    codes = codes.clamp(max=ALL_ZERO - 1).masked_fill(bits == math.inf, ALL_ZERO)
    return (
        codes.masked_fill(bits.isnan(), NOT_SEEN)
        .masked_fill(record.is_nonfinite(), NONFINITE)
        .int()
    )


def _count_codes(values: torch.Tensor) -> torch.Tensor:
    logs = (values.double().clamp(min=1).log2() * _COUNTS_A_DOUBLING).round()
    codes = (logs.int() + NONE + 1).masked_fill(values == 0, NONE)
    return codes.masked_fill(values < 0, NOT_COUNTED)


def _gathered(
    codes: torch.Tensor,
    rows: list[int],
    lines: list[list[int]],
    shape: tuple[int, int],
    absent: int,
) -> torch.Tensor:
    """Codes of `[steps, entries]` as `[rows, columns]`, joined where steps share one."""
    places = [column for column, several in enumerate(lines) for _ in several]
    order = [i for several in lines for i in several]
    whole = torch.full(shape[::-1], absent, dtype=torch.int32, device="cpu")
    if not places or not rows:
        return whole.T
    index = torch.tensor(places, device="cpu")[:, None].expand(-1, len(rows))
    kind = "amin" if absent == NOT_SEEN else "amax"
    found = torch.full_like(whole[:, : len(rows)], absent)
    found.scatter_reduce_(0, index, codes[order], kind)
    whole[:, rows] = found
    return whole.T
