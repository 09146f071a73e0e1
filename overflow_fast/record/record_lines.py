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
import collections
import ctypes
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from .. import _C
from ..capture.watch import ModelWatch, models_of
from ..core.modules import parameters_of, unwrapped_class
from ..files.json_text import to_plain
from ..files.reading import FileError
from ..report.report import Cost
from ..report.run_log import RunIdentity
from ..text import shortened
from ..tree import entry_label
from ..types import TensorPath
from ..verdict.verdict import kind_of

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


# The parts of a flight record: its entries and its steps.


# The most severe comes first.
_ACTIONS = ("raise", "skip", "warn", "spike")


@dataclass(frozen=True)
class RecordEntry:
    """A tensor that was looked at in many steps.

    Attributes:
        model: Which of the guard's models it is of.
        module: The qualified name of the module; "" for the root, or for none.
        class_name: The module's class, or "".
        kind: "output", "grad_output", "weight", "buffer", "gradient",
            "optimizer_state", or "recorded" for a loss or what `record()` was given;
            "unknown" where its line was damaged.
        label: Which tensor of the module, such as `output[0]` or `weight`.
        dtype: Its dtype, such as "float16".
        limit: The largest finite number of the dtype.
        numel: How many elements it had when it was first seen.
    """

    model: int
    module: str
    class_name: str
    kind: str
    label: str
    dtype: str
    limit: float
    numel: int

    @property
    def path(self) -> TensorPath:
        """Where the tensor is; `str()` of it is its name on pages."""
        return TensorPath.from_label(self.module, self.kind, self.label)


@dataclass(frozen=True)
class RecordStep:
    """A step, or several older ones that share a line.

    Attributes:
        first: The number of the first step.
        last: The number of the last one.
        count: How many watched steps these are.
        time: When the last one ended, in seconds since 1970.
        seconds: How long they took; None in a loop that calls `check()` alone.
        guard_seconds: How much of it the guard took, or None.
        learning_rate: The highest; None if it was not known.
        actions: How often the guard did "raise", "skip" or "warn", and how many finite
            steps had a "spike".
        num_skipped: How many optimizer steps were skipped, by whomever.
        loss: The largest magnitude of the loss (a stat has no sign): what
            `guard.record(loss=...)` was given, else what the model returned as its
            loss; None if there was none.
        loss_scale: The largest scale of a GradScaler, or None.
        grad_norm: The largest that `guard.record(grad_norm=...)` was given, or None.
    """

    first: int
    last: int
    count: int
    time: float
    seconds: float | None
    guard_seconds: float | None
    learning_rate: float | None
    actions: dict[str, int] = field(default_factory=dict)
    num_skipped: int = 0
    loss: float | None = None
    loss_scale: float | None = None
    grad_norm: float | None = None

    @property
    def action(self) -> str | None:
        """The most severe of the actions, or None."""
        return next((each for each in _ACTIONS if each in self.actions), None)

    @property
    def guard_share(self) -> float | None:
        """The guard's share of the time, or None if that was not measured."""
        if not self.seconds or self.guard_seconds is None:
            return None
        return self.guard_seconds / self.seconds


# The entries of a flight record, from the lines that name them.


def widths_of(steps: Sequence[Line]) -> list[int]:
    """The number of entries of each model, by the widest of its lines."""
    models = max((len(line["models"]) for line in steps), default=0)
    widths = [0] * models
    for line in steps:
        for i, columns in enumerate(line["models"]):
            widths[i] = max(widths[i], columns["num"])
    return widths


def entries_of(heads: Sequence[Line], widths: Sequence[int]) -> list[RecordEntry]:
    """The entries of all models; those whose line was damaged are of no known kind.

    Args:
        heads: The lines of entries.
        widths: How many entries each model has; of further ones no step tells.
    """
    by_model = collections.defaultdict[int, list[Line]](list)
    for line in heads:
        by_model[line["model"]].append(line)
    return [
        each
        for model, width in enumerate(widths)
        for each in _read_entries(by_model[model], model, width)
    ]


def _read_entries(heads: Sequence[Line], model: int, width: int) -> list[RecordEntry]:
    found = [
        RecordEntry(model, "", "", "unknown", f"entry {i}", "unknown", math.nan, 0)
        for i in range(width)
    ]
    for line in heads:
        room = max(0, width - line["first"])  # its step may be missing
        for i, each in enumerate(line["entries"][:room]):
            found[line["first"] + i] = RecordEntry(
                model, each["module"], each["class"], *_rest(each)
            )
    return found


def _rest(entry: Line) -> tuple[str, str, str, float, int]:
    limit = float(entry["limit"])
    return entry["kind"], entry["label"], entry["dtype"], limit, entry["numel"]


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
