"""Makes the lines of a flight record: its run, its entries, its steps, folded ones."""

from __future__ import annotations

import base64
import ctypes
import sys
import time
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from .. import _C
from ..capture.watch import ModelWatch, models_of
from ..core.modules import parameters_of, unwrapped_class
from ..files.json_text import to_plain
from ..report.report import Cost
from ..report.run_log import RunIdentity
from ..text import shortened
from ..tree import entry_label
from ..types import TensorPath
from ..verdict.verdict import kind_of
from .record_lines import (
    COLUMNS,
    COUNTS,
    KIND,
    RECORD_SCHEMA,
    Line,
    as_tensor,
    read_numbers,
)

# So many lines of a level are folded into one of the next.
FOLD = 16
TOP_LEVEL = 3  # 4,096 steps, or more where there is no room


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
        read = [read_numbers(each, name, sys.byteorder) for each in several]
        found = [as_tensor(numbers) for numbers in read if numbers is not None]
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


# The lines of a flight record: its run, its entries, a step without its values.


_OF_CALLS = (_C.FrameKind.FORWARD, _C.FrameKind.BACKWARD)


def run_line(run: RunIdentity, watches: Sequence[ModelWatch], policy: object) -> Line:
    """The first line: schema, versions, host, rank, devices, models."""
    of_record = {"kind": KIND, "schema": RECORD_SCHEMA}
    line: Line = to_plain(
        {
            **of_record,  # in front
            **run.header(watches, policy),
            **of_record,
            "byteorder": sys.byteorder,
            "devices": _devices(watches),
        }
    )
    return line


def _devices(watches: Sequence[ModelWatch]) -> list[str]:
    models = models_of(watches).values()
    devices = {
        parameter.device for model in models for parameter in parameters_of(model)
    }
    return sorted(map(_device_name, devices))


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"


def entry_lines(watch: ModelWatch, model: int, first: int) -> list[Line]:
    """The line of a model's entries from one on, if there are more.

    Args:
        watch: The model's.
        model: Which of the watched models it is.
        first: How many are in the file already.
    """
    columns = watch.recorder.row_columns(first)
    if not columns:
        return []
    entries = [_entry(watch, column) for column in columns]
    return [{"kind": "entries", "model": model, "first": first, "entries": entries}]


def _entry(watch: ModelWatch, column: _C.RowColumn) -> Line:
    label, module, class_name = entry_label(column.place), "", ""
    kind = kind_of(column.place.label.role)
    if column.place.kind in _OF_CALLS:
        module = watch.name_at(column.place.module)
        own = watch.module_at(column.place.module)
        class_name = "" if own is None else unwrapped_class(type(own)).__name__
    elif column.place.kind != _C.FrameKind.RECORDED:
        path = TensorPath.from_fqn(kind, label)
        module, label = path.module, path.path
    entry: Line = {
        "module": shortened(module),
        "class": shortened(class_name),
        "kind": kind,
        "label": shortened(label),
        "dtype": column.dtype,
        "limit": column.limit,
        "numel": column.numel,
    }
    plain: Line = to_plain(entry)
    return plain


def step_line(step: int, cost: Cost | None, optimizers: Sequence[Optimizer]) -> Line:
    """The line of a step without its values; see `FlightRecorder.end_step`."""
    return {
        "kind": "steps",
        "level": 0,
        "first": step,
        "last": step,
        "count": 1,
        "time": round(time.time(), 3),
        "seconds": None if cost is None else round(cost.step_seconds, 6),
        "guard_seconds": None if cost is None else round(cost.guard_seconds, 6),
        "learning_rate": to_plain(_learning_rate(optimizers)),
        "actions": {},
        "skipped": 0,
    }


def _learning_rate(optimizers: Sequence[Optimizer]) -> float | None:
    """Of the first group of the first optimizer; None where it is on a device."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, torch.Tensor) and not rate.is_cpu:
                return None
            return None if rate is None else float(rate)
    return None
