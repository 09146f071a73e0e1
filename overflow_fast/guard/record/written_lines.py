"""The lines that a guard adds to a flight record: its run, its entries, a step."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch
from msgspec import UNSET
from torch.optim import Optimizer

from ... import _C
from ...base.modules import class_name_of, parameters_of
from ...base.text import shortened
from ..files.json_text import to_plain
from ..report.cost import Cost
from ..report.run_identity import RunIdentity
from ..verdict.entry_headroom import path_of
from ..watching.watch import ModelWatch, models_of
from .record_lines import (
    COLUMNS,
    RECORD_SCHEMA,
    Columns,
    EntriesLine,
    EntryName,
    FlightRecordLine,
    StepsLine,
)


def columns_of(row: _C.StepRow, most: int) -> Columns:
    """The columns of one model's row; one that was not counted is left out.

    Args:
        row: The row.
        most: How many entries have a name in the file; further ones are left out.
    """
    num = min(row.num_entries, most)
    columns = dict[str, bytes]()
    # Names that a row of the extension may lack: not counted there.
    for name in COLUMNS:
        packed = getattr(row, name, None)
        if packed is not None:
            if num < row.num_entries:
                packed = packed[: num * (len(packed) // row.num_entries)]
            columns[name] = packed
    left_out = row.num_left_out + row.num_entries - num
    return Columns(num=num, **columns, left_out=left_out or UNSET)


_OF_CALLS = (_C.FrameKind.FORWARD, _C.FrameKind.BACKWARD)


def run_line(
    run: RunIdentity, watches: Sequence[ModelWatch], policy: object
) -> FlightRecordLine:
    """The first line: schema, versions, host, rank, devices, models."""
    fields = {**run.fields(watches, policy), "schema": RECORD_SCHEMA}
    return FlightRecordLine(
        **to_plain(fields), byteorder=sys.byteorder, devices=_devices(watches)
    )


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


def entries_line(watch: ModelWatch, model: int, first: int) -> EntriesLine:
    """The line of a model's entries from one on; it has none if there are no more.

    Args:
        watch: The model's.
        model: Which of the watched models it is.
        first: How many are in the file already.
    """
    entries = [_entry(watch, column) for column in watch.recorder.row_columns(first)]
    return EntriesLine(model=model, first=first, entries=entries)


def _entry(watch: ModelWatch, column: _C.RowColumn) -> EntryName:
    path, class_name = path_of(watch, column.place), ""
    if column.place.kind in _OF_CALLS:
        own = watch.module_at(column.place.module)
        class_name = "" if own is None else class_name_of(type(own))
    return EntryName(
        module=to_plain(shortened(path.module)),
        class_name=to_plain(shortened(class_name)),
        kind=path.role,
        label=to_plain(shortened(path.label)),
        dtype=column.dtype,
        limit=to_plain(column.limit),
        numel=column.numel,
    )


def step_line(
    step: int, cost: Cost | None, optimizers: Sequence[Optimizer]
) -> StepsLine:
    """The line of a step without its values; see `FlightRecorder.end_step`."""
    return StepsLine(
        first=step,
        last=step,
        count=1,
        time=round(time.time(), 3),
        seconds=None if cost is None else round(cost.step_seconds, 6),
        guard_seconds=None if cost is None else round(cost.guard_seconds, 6),
        learning_rate=to_plain(_learning_rate(optimizers)),
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
