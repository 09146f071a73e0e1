"""Several lines of steps become one: extremes and counts of entries over the steps."""

from __future__ import annotations

import base64
import ctypes
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ..files.fields import line_of
from .columns import as_tensor, read_numbers
from .record_lines import COLUMNS, COUNTS, Columns, Line, StepsLine
from .record_step import folded_numbers


def fold(lines: Sequence[Line], level: int) -> Line:
    """One line for several of a run, the oldest first, as their fields are folded.

    Extremes and counts of entries are those over their steps.
    """
    return line_of(
        StepsLine,
        level=level,
        **folded_numbers(lines),
        models=[
            _fold_columns([line["models"][i] for line in lines])
            for i in range(len(lines[0]["models"]))
        ],
    )


def _fold_columns(several: Sequence[Line]) -> Line:
    num = max(columns["num"] for columns in several)
    folded: dict[str, Any] = {"num": num}
    for name in COLUMNS:
        read = [read_numbers(each, name, sys.byteorder) for each in several]
        found = [as_tensor(numbers) for numbers in read if numbers is not None]
        if found:
            folded[name] = _pack(_extremes(name, found, num), name)
    left_out = max(columns.get("left_out", 0) for columns in several)
    return line_of(Columns, **folded, **({"left_out": left_out} if left_out else {}))


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
