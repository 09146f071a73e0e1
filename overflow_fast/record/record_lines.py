"""The lines of a flight record, and the columns that they hold.

A record is JSON Lines with columns in base64. Of the formats that were tried
(benchmarks/bench_record_formats.py; results there), all but HDF5 opened after each of
50 SIGKILLs with no step lost, and an append of a GPT-2 small step took 11 to 22 us.
What decided is reading while a run writes, which a job on NFS is watched by: of 50
plain copies of the growing file JSON Lines and Arrow's stream opened all, SQLite with a
rollback journal 42, SQLite's WAL 5, HDF5 none. A SQLite file is whole only together
with its journal and under locks, which NFS may not have. Arrow needs pyarrow (170 MB);
JSON Lines needs nothing. Parquet and safetensors write a file once, as a whole.
"""

from __future__ import annotations

import base64
import ctypes
import sys
from collections.abc import Sequence
from typing import Any

import torch

from .. import _C
from ..files.json_text import to_plain
from ..files.reading import FileError

# The version of the lines: docs/formats.md.
RECORD_SCHEMA = 1
KIND = "flight_record"  # of the first line
BEGINNING = b'{"kind": "flight_record"'

EXTREMES = ("abs_min", "abs_max")
COUNTS = ("num_nan", "num_inf", "num_saturated", "num_zero")
COLUMNS = EXTREMES + COUNTS
# So many lines of a level are folded into one of the next.
FOLD = 16
TOP_LEVEL = 3  # 4,096 steps, or more where there is no room

Line = dict[str, Any]


class RecordError(FileError):
    """A file that cannot be read as a flight record; says why."""


def columns_of(row: _C.StepRow, most: int) -> Line:
    """The columns of one model's row; one that was not counted is left out.

    Args:
        row: The row.
        most: How many entries have a name in the file; further ones are left out.
    """
    num = min(row.num_entries, most)
    columns: Line = {"num": num}
    # Names that a row of the extension may lack: not counted there.
    for name in COLUMNS:
        packed = getattr(row, name, None)
        if packed is not None:
            if num < row.num_entries:
                packed = packed[: num * (len(packed) // row.num_entries)]
            columns[name] = base64.b64encode(packed).decode()
    left_out = row.num_left_out + row.num_entries - num
    if left_out:
        columns["left_out"] = left_out
    return columns


def read_column(columns: Line, name: str, byteorder: str) -> torch.Tensor | None:
    """A column of a line: float64, or int64 for counts; None where nothing counted it.

    Returns:
        A tensor of shape [num]. In extremes nan stands for an entry that was not looked
        at, or held a nan; in counts -1 for one that was not counted.
    """
    if name not in columns:
        return None
    num, data = columns["num"], columns[name]  # bytes, where a reader has decoded them
    packed = bytearray(data if isinstance(data, bytes) else base64.b64decode(data))
    is_count = name in COUNTS
    dtype = torch.int64 if is_count else torch.float64
    if not packed:
        return torch.zeros(num, dtype=dtype, device="cpu")
    size = len(packed) // num
    stored = dtype if size == 8 else torch.float32
    if byteorder != sys.byteorder:
        packed = bytearray(b"".join(_reversed_numbers(packed, size)))
    return torch.frombuffer(packed, dtype=stored).to(dtype)


def _reversed_numbers(packed: bytearray, size: int) -> list[bytes]:
    return [bytes(packed[i : i + size][::-1]) for i in range(0, len(packed), size)]


def fold(lines: Sequence[Line], level: int) -> Line:
    """One line for several of a run, the oldest first: extremes over their steps.

    Of the counts it is the most of any step; sums of times, actions and skips.
    """
    rates = [line["learning_rate"] for line in lines]
    known = [float(rate) for rate in rates if rate is not None]
    actions: dict[str, int] = {}
    for line in lines:
        for action, count in line["actions"].items():
            actions[action] = actions.get(action, 0) + count
    return {
        "kind": "steps",
        "level": level,
        "first": lines[0]["first"],
        "last": lines[-1]["last"],
        "time": lines[-1]["time"],
        **{name: _sum([line[name] for line in lines]) for name in _SUMS},
        "learning_rate": to_plain(max(known, default=None)),
        "actions": actions,
        "models": [
            _fold_columns([line["models"][i] for line in lines])
            for i in range(len(lines[0]["models"]))
        ],
    }


def _sum(numbers: Sequence[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


_SUMS = ("count", "seconds", "guard_seconds", "skipped")


def _fold_columns(several: Sequence[Line]) -> Line:
    num = max(columns["num"] for columns in several)
    folded: Line = {"num": num}
    for name in COLUMNS:
        read = [read_column(each, name, sys.byteorder) for each in several]
        found = [column for column in read if column is not None]
        if found:
            folded[name] = _pack(_extremes(name, found, num), name)
    left_out = max(columns.get("left_out", 0) for columns in several)
    return {**folded, "left_out": left_out} if left_out else folded


def _extremes(name: str, columns: Sequence[torch.Tensor], num: int) -> torch.Tensor:
    """Over the steps that have an entry; it came to be in the course of the run."""
    is_count = name in COUNTS
    absent = -1 if is_count else float("nan")
    whole = [
        torch.nn.functional.pad(c, (0, num - len(c)), value=absent) for c in columns
    ]
    stacked = torch.stack(whole)
    if is_count:
        return stacked.amax(0)
    end = float("inf") if name == "abs_min" else -1.0
    is_absent = stacked.isnan()
    kept = stacked.masked_fill(is_absent, end)
    folded = kept.amin(0) if name == "abs_min" else kept.amax(0)
    return folded.masked_fill(is_absent.all(0), absent)


def _pack(column: torch.Tensor, name: str) -> str:
    if name in COUNTS:
        packed = column if column.any() else column[:0]
    else:
        narrow = column.float()
        is_exact = bool(((narrow.double() == column) | column.isnan()).all())
        packed = narrow if is_exact else column
    packed = packed.contiguous()
    raw = ctypes.string_at(packed.data_ptr(), packed.nbytes) if packed.nbytes else b""
    return base64.b64encode(raw).decode()
