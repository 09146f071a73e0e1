"""The numbers behind the page's pictures, and how the page carries them."""

from __future__ import annotations

import base64
import ctypes
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ...base.text import printable
from ...guard.files.json_text import dumps
from ...guard.record.record_lines import RecordEntry
from ...guard.record.record_step import RecordStep
from ..record.table import DRAWN, FlightRecord

# Columns of the pictures: which steps of which records share one.


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


# Names of rows: the block that a module belongs to, the family of an entry.


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


# The sparklines above the heatmap, from top to bottom, with the words in front of them.


Sparkline = list[float | None]
_GRADIENT = "largest_gradient"  # stands for the norm where nobody gave that
SPARKLINES = {
    **{name: DRAWN[name] for name in ("loss", "grad_norm")},
    _GRADIENT: "largest gradient",
    **DRAWN,
    "spikes": "spikes",
    "skips": "skips",
}


def sparklines_of(
    records: Sequence[FlightRecord], columns: Sequence[Column]
) -> dict[str, Sparkline]:
    """The numbers of each column: the largest of its steps and of all ranks.

    Returns:
        Lists by the names of `SPARKLINES`, in their order: those of which a number is
        known, "skips", the most that a rank has skipped, and "spikes", if there were
        any.
    """
    found: dict[str, Sparkline] = {
        name: [_largest(getattr(s, name) for s in _steps(records, c)) for c in columns]
        for name in DRAWN
    }
    if not any_known(found["grad_norm"]):
        largest = [_largest_gradients(record) for record in records]
        found[_GRADIENT] = [_largest(_of_column(largest, c)) for c in columns]
    known = {
        name: sparkline for name, sparkline in found.items() if any_known(sparkline)
    }
    events: dict[str, Sparkline] = {
        "spikes": [_spikes(records, column) for column in columns],
        "skips": [_skips(records, column) for column in columns],
    }
    known |= {name: sparkline for name, sparkline in events.items() if any(sparkline)}
    return {name: known[name] for name in SPARKLINES if name in known}


def _largest_gradients(record: FlightRecord) -> Sparkline:
    """The largest magnitude of all gradients of weights, for each step of a record."""
    rows = [i for i, each in enumerate(record.entries) if each.kind == "gradient"]
    values = record.values["abs_max"]
    if values is None or not rows or not len(record):
        return [None] * len(record.steps)
    bad = record.is_nonfinite()[:, rows].any(1).tolist()
    seen = values[:, rows].double().nan_to_num(-1.0).amax(1).tolist()
    return [
        math.nan if is_bad else None if most < 0 else most
        for is_bad, most in zip(bad, seen, strict=True)
    ]


def _of_column(
    sparklines: Sequence[Sparkline], column: Column
) -> Iterator[float | None]:
    for sparkline, lines in zip(sparklines, column.lines, strict=True):
        yield from (sparkline[i] for i in lines)


def any_known(sparkline: Sparkline) -> bool:
    """True if a sparkline has a number."""
    return any(value is not None for value in sparkline)


def _steps(records: Sequence[FlightRecord], column: Column) -> Iterator[RecordStep]:
    for record, lines in zip(records, column.lines, strict=True):
        for i in lines:
            yield record.steps[i]


def _largest(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.nan if any(map(math.isnan, known)) else max(known, default=None)


def _spikes(records: Sequence[FlightRecord], column: Column) -> float:
    counts = (step.actions.get("spike", 0) for step in _steps(records, column))
    return max(counts, default=0)


def _skips(records: Sequence[FlightRecord], column: Column) -> float:
    return max(
        sum(record.steps[i].num_skipped for i in lines)
        for record, lines in zip(records, column.lines, strict=True)
    )


# Numbers as the page carries them: differences, deflated, in base64.


_MOST_COLUMNS = 2000  # about the pixels of a wide window; chosen
_LEAST_COLUMNS = 2  # fewer are no row
_LEAST_RANK_COLUMNS = 16  # below that ranks are not worth their bytes
# Together below 2 MiB with the tables and the page's own code.
_MAX_GRID = 1300 * 1024
_MAX_RANKS = 400 * 1024
_CELLS_A_BYTE = 4  # at best, as a guess to begin with
_HALF = BITS // 2


def payloads(sheet: Sheet, incidents: Sequence[tuple[int, str]] = ()) -> dict[str, str]:
    """Packs all that the page's pictures are drawn from.

    Args:
        sheet: The entries of the records.
        incidents: The steps of incidents, and the kinds of their first bad entries.

    Returns:
        Base64 of deflated bytes by name: "meta" is JSON; "headroom" (int16) and the
        counts (uint8) are `[entries, columns]`; "ranks" is `[records, entries,
        columns]` with columns of its own, where there is room. Each number is the
        difference from that of the column before, and bytes of the same weight are
        together.
    """
    records, most = sheet.records, _MOST_COLUMNS
    columns, found = _fitting(lambda most: _whole(sheet, most), most, _MAX_GRID)
    meta = {
        "rows": [
            [
                printable(value) if isinstance(value, str) else value
                for value in (*each.to_dict().values(), block_of(each.module))
            ]
            + [family_of(each.kind)]
            for each in sheet.entries
        ],
        "columns": [[c.first, c.last] for c in columns],
        "sparklines": sparklines_of(records, columns),
        "sparklineNames": SPARKLINES,
        "ranks": [str(record.run.get("rank", "?")) for record in records],
        "rankColumns": [],
        "families": list(FAMILIES),
        "incidents": [
            {"step": step, "family": family_of(kind)} for step, kind in incidents
        ],
    }
    if len(records) > 1:
        num_rows = max(1, len(records) * len(sheet.entries))
        guess = min(most, _MAX_RANKS * _CELLS_A_BYTE // num_rows)
        columns, ranks = _fitting(lambda most: _by_rank(sheet, most), guess, _MAX_RANKS)
        if len(columns) >= min(_LEAST_RANK_COLUMNS, len(sheet.columns(most))):
            found |= ranks
            meta["rankColumns"] = [[c.first, c.last] for c in columns]
    return {"meta": _deflated(dumps(meta).encode()), **found}


_Packed = tuple[list[Column], dict[str, str]]


def _fitting(pack: Callable[[int], _Packed], most: int, max_bytes: int) -> _Packed:
    """Packs as many columns as there is room for."""
    most = max(_LEAST_COLUMNS, most)
    while True:
        columns, found = pack(most)
        if sum(map(len, found.values())) <= max_bytes or most <= _LEAST_COLUMNS:
            return columns, found
        most = max(_LEAST_COLUMNS, most * 2 // 3)


def _whole(sheet: Sheet, most: int) -> _Packed:
    grid = sheet.grid(most)
    counts = {name: packed(values) for name, values in grid.counts.items()}
    return grid.columns, {"headroom": packed(grid.headroom), **counts}


def _by_rank(sheet: Sheet, most: int) -> _Packed:
    columns, numbers = sheet.columns(most), range(len(sheet.records))
    codes = torch.cat([sheet.headroom_of(which, columns) for which in numbers])
    # Half bits, so that there is room for more columns.
    special = (codes == NONFINITE) | (codes >= ALL_ZERO)
    halves = torch.where(special, codes, codes // _HALF * _HALF)
    return columns, {"ranks": packed(halves)}


def packed(codes: torch.Tensor) -> str:
    """Packs int16 or uint8 of shape `[rows, columns]`; see `payloads()`."""
    before = torch.nn.functional.pad(codes.int(), (1, 0))[:, :-1]
    steps = codes.int() - before
    planes = [steps & 255] + (
        [(steps >> 8) & 255] if codes.dtype == torch.int16 else []
    )
    return _deflated(b"".join(map(_bytes, planes)))


def _bytes(values: torch.Tensor) -> bytes:
    flat = values.to(torch.uint8).contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""


def _deflated(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode()
