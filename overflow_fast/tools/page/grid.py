"""The numbers of the page's heatmap: a sheet of rows by columns of steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...guard.record.record_lines import RecordEntry
from ..record.table import FlightRecord
from .columns import Column, columns_of, downsampled

# Codes of headroom, so that the least of several is what they have in common.
BITS = 16  # codes a bit: a magnitude is known to 2.2 %
NONFINITE, ALL_ZERO, NOT_SEEN = -32768, 32766, 32767
# Codes of counts, where the most of several counts: 0 not counted, 1 none, then log2.
NOT_COUNTED, NONE = 0, 1
_COUNTS_A_DOUBLING = 4

_Key = tuple[int, str, str, str, int]


@dataclass
class Grid:
    """Entries by columns of steps, over all records.

    Attributes:
        columns: The columns, the oldest first.
        headroom: int16 of shape `[entries, columns]`: the least of all records.
        counts: uint8 of that shape by "num_saturated" and "num_zero": the most; only
            what was counted.
    """

    columns: list[Column]
    headroom: torch.Tensor
    counts: dict[str, torch.Tensor]


class Sheet:
    """The codes of all records, from which grids of any width are made.

    Args:
        records: The records, of one run or of its ranks.

    Attributes:
        records: The records.
        entries: The rows of a grid, in the order of execution.
        rows: For each record the rows of its entries.
    """

    def __init__(self, records: Sequence[FlightRecord]) -> None:
        self.records = records
        keys = [_keys_of(record) for record in records]
        found = dict[_Key, RecordEntry]()
        for own, record in zip(keys, records, strict=True):
            for key, entry in zip(own, record.entries, strict=True):
                found.setdefault(key, entry)
        self.entries = list(found.values())
        row_of = {key: row for row, key in enumerate(found)}
        self.rows = [[row_of[key] for key in own] for own in keys]
        self._columns = columns_of(records)
        self._headroom = [_headroom_codes(record) for record in records]
        self._counts = {
            name: [
                None
                if (values := record.values[name]) is None
                else _count_codes(values)
                for record in records
            ]
            for name in ("num_saturated", "num_zero")
        }

    def columns(self, most: int) -> list[Column]:
        """The columns of a grid that has at most so many; at least 2."""
        return downsampled(self._columns, most)

    def grid(self, most: int) -> Grid:
        """Makes a grid of at most so many columns; at least 2."""
        columns, headroom = self.columns(most), None
        for which in range(len(self.records)):
            own = self.headroom_of(which, columns)
            headroom = own if headroom is None else torch.minimum(headroom, own)
        if headroom is None:
            headroom = torch.empty(0, 0, dtype=torch.int16, device="cpu")
        counts = dict[str, torch.Tensor]()
        for name, records in self._counts.items():
            for which, codes in enumerate(records):
                if codes is not None:
                    own = self._gathered(codes, which, columns, NOT_COUNTED)
                    counts[name] = torch.maximum(counts.get(name, own), own)
        return Grid(columns, headroom, counts)

    def headroom_of(self, which: int, columns: Sequence[Column]) -> torch.Tensor:
        """One record's headroom: int16 of shape `[entries, columns]`."""
        return self._gathered(self._headroom[which], which, columns, NOT_SEEN)

    def _gathered(
        self, codes: torch.Tensor, which: int, columns: Sequence[Column], absent: int
    ) -> torch.Tensor:
        """Codes of `[steps, entries]` as `[entries, columns]`, joined in columns."""
        lines = [column.lines[which] for column in columns]
        places = [column for column, several in enumerate(lines) for _ in several]
        order = [i for several in lines for i in several]
        shape, rows = (len(columns), len(self.entries)), self.rows[which]
        whole = torch.full(shape, absent, dtype=codes.dtype, device="cpu")
        if not places or not rows:
            return whole.T
        index = torch.tensor(places, device="cpu")[:, None].expand(-1, len(rows))
        found = torch.full_like(whole[:, : len(rows)], absent)
        kind = "amin" if absent == NOT_SEEN else "amax"
        found.scatter_reduce_(0, index, codes[order], kind)
        whole[:, rows] = found
        return whole.T


def _keys_of(record: FlightRecord) -> list[_Key]:
    """The keys of a record's entries, by which those of other ranks are the same."""
    seen: Counter[tuple[int, str, str, str]] = Counter()
    keys = list[_Key]()
    for each in record.entries:
        name = each.model, each.module, each.kind, each.label
        keys.append((*name, seen[name]))
        seen[name] += 1
    return keys


def _headroom_codes(record: FlightRecord) -> torch.Tensor:
    bits = record.headroom_bits()
    codes = (bits.clamp(0, ALL_ZERO / BITS) * BITS).round()
    codes = codes.clamp(max=ALL_ZERO - 1).masked_fill(bits == math.inf, ALL_ZERO)
    return (
        codes.masked_fill(bits.isnan(), NOT_SEEN)
        .masked_fill(record.is_nonfinite(), NONFINITE)
        .short()
    )


def _count_codes(values: torch.Tensor) -> torch.Tensor:
    logs = (values.double().clamp(min=1).log2() * _COUNTS_A_DOUBLING).round()
    codes = (logs.int() + NONE + 1).masked_fill(values == 0, NONE)
    return codes.masked_fill(values < 0, NOT_COUNTED).byte()


FAMILIES = {
    "outputs": ("output", "unknown"),
    "gradients of outputs": ("grad_output",),
    "gradients of weights": ("gradient",),
    "weights": ("weight", "buffer", "optimizer_state"),
    "recorded": ("recorded",),
}
_FAMILY_OF = {kind: name for name, kinds in FAMILIES.items() for kind in kinds}


def family_of(kind: str) -> str:
    """The switch of the page that shows entries of a kind."""
    return _FAMILY_OF.get(kind, "outputs")


def block_of(module: str) -> str:
    """The block that a module is folded into: "h.0" for "h.0.attn.c_proj"."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return parts[0]


def name_of(entry: RecordEntry, has_models: bool = False) -> str:
    """The name of an entry, such as "h.0.attn: output[0]"."""
    where = f"model {entry.model}: " if has_models else ""
    return f"{where}{entry.path}"
