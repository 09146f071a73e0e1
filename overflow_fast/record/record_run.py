"""The lines of a flight record: its run, its entries, a step without its values."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from .. import _C
from ..core.names import unwrapped_class
from ..files.json_text import to_plain
from ..recording.labels import entry_label
from ..recording.watch import ModelWatch
from ..report.report import Cost
from ..report.run import Run
from ..text import shortened
from ..verdict.verdict import kind_of
from .record_lines import KIND, RECORD_SCHEMA, Line

_OF_CALLS = (_C.FrameKind.FORWARD, _C.FrameKind.BACKWARD)


def run_line(run: Run, watches: Sequence[ModelWatch], policy: object) -> Line:
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
    models = [model for watch in watches if (model := watch.model) is not None]
    devices = {parameter.device for model in models for parameter in model.parameters()}
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
    if column.place.kind in _OF_CALLS:
        module = watch.name_at(column.place.module)
        own = watch.module_at(column.place.module)
        class_name = "" if own is None else unwrapped_class(type(own)).__name__
    elif column.place.kind != _C.FrameKind.RECORDED:
        module, _, label = label.rpartition(".")
    entry: Line = {
        "module": shortened(module),
        "class": shortened(class_name),
        "kind": kind_of(column.place.label.role),
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
