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
import math
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...scanner.types import TensorPath
from ..files.reading import FileError

if TYPE_CHECKING:
    import torch

    Numbers = array[float] | array[int]

# The version of the lines: docs/formats.md.
RECORD_SCHEMA = 1
KIND = "flight_record"  # of the first line
BEGINNING = b'{"kind": "flight_record"'

EXTREMES = ("abs_min", "abs_max")
COUNTS = ("num_nan", "num_inf", "num_saturated", "num_zero")
COLUMNS = EXTREMES + COUNTS

Line = dict[str, Any]


class RecordError(FileError):
    """A file that cannot be read as a flight record; says why."""


def read_numbers(columns: Line, name: str, byteorder: str) -> Numbers | None:
    """A column of a line: floats, or whole numbers for counts.

    Returns:
        An array of `columns["num"]` numbers; None where nothing counted them. In
        extremes nan stands for an entry that was not looked at, or held a nan; in
        counts -1 for one that was not counted.
    """
    if name not in columns:
        return None
    num, data = columns["num"], columns[name]  # bytes, where a reader has decoded them
    packed = data if isinstance(data, bytes) else base64.b64decode(data)
    code = "q" if name in COUNTS else "d"
    if not packed:
        return array(code, bytes(8 * num))
    numbers: Numbers = array(code if len(packed) // num == 8 else "f", packed)
    if byteorder != sys.byteorder:
        numbers.byteswap()
    return numbers


def as_tensor(numbers: Numbers) -> torch.Tensor:
    """The same numbers as a tensor on the CPU: float64, or int64 for counts."""
    import torch

    dtypes = {"f": torch.float32, "d": torch.float64, "q": torch.int64}
    stored = dtypes[numbers.typecode]
    if not numbers:
        return torch.empty(0, dtype=stored, device="cpu")
    found = torch.frombuffer(numbers, dtype=stored)
    return found.double() if found.is_floating_point() else found


def bits_left(limit: float, abs_max: float) -> float:
    """The number of times that a magnitude could double before it passes a limit.

    Returns:
        inf for 0; -inf for inf; nan where one of the two is not known.
    """
    if abs_max == 0:
        return math.inf if limit > 0 else math.nan
    ratio = limit / abs_max
    if ratio > 0:
        return math.log2(ratio)
    return -math.inf if ratio == 0 else math.nan


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
