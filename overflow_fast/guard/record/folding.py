"""Several lines of steps become one: extremes and counts of entries over the steps."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import torch
from msgspec import UNSET

from .columns import as_tensor, read_numbers
from .record_lines import COLUMNS, COUNTS, Columns, StepsLine
from .record_step import folded_numbers


def fold(lines: Sequence[StepsLine], level: int) -> StepsLine:
    """One line for several of a run, the oldest first, as their fields are folded.

    Extremes and counts of entries are those over their steps.
    """
    models = [
        _fold_columns([line.models[i] for line in lines])
        for i in range(len(lines[0].models))
    ]
    return StepsLine(**folded_numbers(lines), level=level, models=models)


def _fold_columns(several: Sequence[Columns]) -> Columns:
    num = max(columns.num for columns in several)
    folded = dict[str, bytes]()
    for name in COLUMNS:
        read = [read_numbers(each, name, sys.byteorder) for each in several]
        found = [as_tensor(numbers) for numbers in read if numbers is not None]
        if found:
            folded[name] = _pack(_extremes(name, found, num), name)
    left_out = max(columns.left_out or 0 for columns in several)
    return Columns(num=num, **folded, left_out=left_out or UNSET)


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


def _pack(column: torch.Tensor, name: str) -> bytes:
    if name in COUNTS:
        packed = column if column.any() else column[:0]
    else:
        narrow = column.float()
        is_exact = bool(((narrow.double() == column) | column.isnan()).all())
        packed = narrow if is_exact else column
    packed = packed.contiguous()
    return ctypes.string_at(packed.data_ptr(), packed.nbytes) if packed.nbytes else b""
