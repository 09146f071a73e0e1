"""The lines of a flight record that say what its run and its entries are."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from .. import _C
from ..core.names import unwrapped_class
from ..core.strict_json import to_plain
from ..recording.labels import entry_label
from ..recording.watch import ModelWatch
from ..report.run import Run
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
        "module": module,
        "class": class_name,
        "kind": kind_of(column.place.label.role),
        "label": label,
        "dtype": column.dtype,
        "limit": column.limit,
        "numel": column.numel,
    }
    plain: Line = to_plain(entry)
    return plain
