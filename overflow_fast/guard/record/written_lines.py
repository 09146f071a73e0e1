"""The lines that a guard adds to a flight record: its run, its entries, a step."""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ... import _C
from ...base.modules import class_name_of, parameters_of
from ...base.text import shortened
from ...base.tree import entry_label
from ...base.types import TensorPath
from ..files.fields import line_of
from ..files.json_text import to_plain
from ..report.cost import Cost
from ..report.run_identity import RunIdentity
from ..verdict.roles import kind_of
from ..watching.watch import ModelWatch, models_of
from .record_lines import (
    COLUMNS,
    RECORD_SCHEMA,
    Columns,
    EntriesLine,
    EntryName,
    FlightRecordLine,
    Line,
    StepsLine,
)


def columns_of(row: _C.StepRow, most: int) -> Line:
    """The columns of one model's row; one that was not counted is left out.

    Args:
        row: The row.
        most: How many entries have a name in the file; further ones are left out.
    """
    num = min(row.num_entries, most)
    columns: dict[str, Any] = {"num": num}
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
    return line_of(Columns, **columns)


_OF_CALLS = (_C.FrameKind.FORWARD, _C.FrameKind.BACKWARD)


def run_line(run: RunIdentity, watches: Sequence[ModelWatch], policy: object) -> Line:
    """The first line: schema, versions, host, rank, devices, models."""
    line: Line = to_plain(
        line_of(
            FlightRecordLine,
            **{**run.fields(watches, policy), "schema": RECORD_SCHEMA},
            byteorder=sys.byteorder,
            devices=_devices(watches),
        )
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
    return [line_of(EntriesLine, model=model, first=first, entries=entries)]


def _entry(watch: ModelWatch, column: _C.RowColumn) -> Line:
    label, module, class_name = entry_label(column.place), "", ""
    kind = kind_of(column.place.label.role)
    if column.place.kind in _OF_CALLS:
        module = watch.name_at(column.place.module)
        own = watch.module_at(column.place.module)
        class_name = "" if own is None else class_name_of(type(own))
    elif column.place.kind != _C.FrameKind.RECORDED:
        path = TensorPath.from_fqn(kind, label)
        module, label = path.module, path.path
    entry: Line = to_plain(
        line_of(
            EntryName,
            module=shortened(module),
            class_name=shortened(class_name),
            kind=kind,
            label=shortened(label),
            dtype=column.dtype,
            limit=column.limit,
            numel=column.numel,
        )
    )
    return entry


def step_line(step: int, cost: Cost | None, optimizers: Sequence[Optimizer]) -> Line:
    """The line of a step without its values; see `FlightRecorder.end_step`."""
    return line_of(
        StepsLine,
        level=0,
        first=step,
        last=step,
        count=1,
        time=round(time.time(), 3),
        seconds=None if cost is None else round(cost.step_seconds, 6),
        guard_seconds=None if cost is None else round(cost.guard_seconds, 6),
        learning_rate=to_plain(_learning_rate(optimizers)),
        actions={},
        num_skipped=0,
        models=[],
    )


def _learning_rate(optimizers: Sequence[Optimizer]) -> float | None:
    """Of the first group of the first optimizer; None where it is on a device."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, torch.Tensor) and not rate.is_cpu:
                return None
            return None if rate is None else float(rate)
    return None
