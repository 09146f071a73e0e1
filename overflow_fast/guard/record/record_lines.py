"""The lines of a flight record, their fields, and the columns that they hold.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from ...scanner.types import TensorPath
from ..files.fields import (
    ABSENT,
    REQUIRED,
    Count,
    Index,
    Number,
    Seconds,
    StepNumber,
    Time,
    Written,
    derived,
    documented,
    fields_of,
    written,
)
from ..files.json_text import to_plain
from ..files.reading import FileError
from ..report.log_lines import OfRun

# The version of the lines: docs/formats.md.
RECORD_SCHEMA = 1
KIND = "flight_record"  # of the first line
BEGINNING = b'{"kind": "flight_record"'

Line = dict[str, Any]


class RecordError(FileError):
    """A file that cannot be read as a flight record; says why."""


class LineSpan(NamedTuple):
    """Where a line of steps lies in its file, or several that are to be one line."""

    offset: int
    length: int
    level: int


# A step. What is declared here of a number is all that reading, folding, pages, `watch`
# and `export` need; its value is set in `flight.step_line()`.


def _oldest(values: Sequence[Any]) -> Any:
    return values[0]


def _newest(values: Sequence[Any]) -> Any:
    return values[-1]


def _sum(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _most(values: Sequence[Any]) -> Any:
    known = [float(value) for value in values if value is not None]
    return to_plain(max(known, default=None))


def _sums(values: Sequence[Any]) -> Any:
    found: dict[str, int] = {}
    for each in values:
        for name, count in each.items():
            found[name] = found.get(name, 0) + count
    return found


def _of_step(
    meaning: str,
    folded: Callable[[Sequence[Any]], Any],
    kind: Any,
    default: Any = REQUIRED,
    **more: Any,
) -> Any:
    """Declares a field of a step's line.

    Args:
        meaning: What it is.
        folded: Makes the value of a line out of those of several, the oldest first.
        kind: Its type in the file.
        default: What a reader takes where a file lacks it.
        **more: `drawn`: the words of a sparkline of pages and of a column of `watch`,
            if it has them. `name`, `since`: see `Field`.
    """
    return written(meaning, default, kind=kind, folded=folded, **more)


# The most severe comes first.
_ACTIONS = ("raise", "skip", "warn", "spike")


@documented
@dataclass(frozen=True)
class RecordStep:
    """A step, or several older ones that share a line."""

    first: int = _of_step("the number of the first step", _oldest, StepNumber)
    last: int = _of_step("the number of the last one", _newest, StepNumber)
    count: int = _of_step("how many watched steps these are", _sum, Count)
    time: float = _of_step(
        "when the last one ended, in seconds since 1970", _newest, Time
    )
    seconds: float | None = _of_step(
        "how long they took; None in a loop that calls `check()` alone",
        *(_sum, Seconds | None, None),
    )
    guard_seconds: float | None = _of_step(
        "how much of it the guard took, or None", _sum, Seconds | None, None
    )
    learning_rate: float | None = _of_step(
        "the highest of the first group; None if it is not known, or on a device",
        *(_most, Number | None, None),
        drawn="learning rate",
    )
    actions: dict[str, int] = _of_step(  # noqa: RUF009, it is made anew for each
        'how often the guard did "raise", "skip" or "warn", and how many finite steps '
        'had a "spike"',
        *(_sums, dict[str, Count], {}),
    )
    num_skipped: int = _of_step(
        "how many optimizer steps were skipped, by whomever",
        *(_sum, Count, 0),
        name="skipped",
    )
    loss: float | None = derived(
        "the largest magnitude of the loss (a stat has no sign): what "
        "`guard.record(loss=...)` was given, else what the model returned as its loss; "
        "None if there was none",
        None,
        drawn="loss",
    )
    loss_scale: float | None = derived(
        "the largest scale of a GradScaler, or None", None, drawn="loss scale"
    )
    grad_norm: float | None = derived(
        "the largest that `guard.record(grad_norm=...)` was given, or None",
        None,
        drawn="gradient norm",
    )

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


# An entry.


@documented
@dataclass(frozen=True)
class RecordEntry:
    """A tensor that was looked at in many steps."""

    model: int = derived("which of the guard's models it is of")
    module: str = written("the name of the module; empty for the root, or none")
    class_name: str = written("the module's class, or nothing", name="class")
    kind: str = written(
        '"output", "grad_output", "weight", "buffer", "gradient", "optimizer_state", '
        'or "recorded" for a loss or what `record()` was given; "unknown" where its '
        "line was damaged"
    )
    label: str = written("which tensor of the module, such as `output[0]` or `weight`")
    dtype: str = written('its dtype, such as "float16"')
    limit: float = written("the largest finite number of the dtype", kind=Number)
    numel: int = written("how many elements it had when it was first seen", kind=Count)

    @property
    def path(self) -> TensorPath:
        """Where the tensor is; `str()` of it is its name on pages."""
        return TensorPath.from_label(self.module, self.kind, self.label)


# The lines.


class FlightRecordLine(OfRun, kind=KIND):
    """The first line. Nothing in it is needed to read the others."""

    schema: int = written("the version of the format")
    byteorder: Literal["little", "big"] = written("that of the columns", ABSENT)
    devices: list[str] = written("those of the parameters", ABSENT)


class EntriesLine(Written, kind="entries"):
    """The names of entries, when there are new ones."""

    model: Index = written("the index of their model")
    first: Index = written("the index of the first of them")
    entries: list[RecordEntry] = written("they, in the order in which they first came")


_Bytes: TypeAlias = bytes


class Columns(Written):
    """The columns of one model, as packed numbers in base64."""

    num: Index = written("how many entries they have")
    abs_min: _Bytes = written("the smallest magnitude of each", ABSENT, is_count=False)
    abs_max: _Bytes = written("the largest magnitude of each", ABSENT, is_count=False)
    num_nan: _Bytes = written("how many elements are nan", ABSENT, is_count=True)
    num_inf: _Bytes = written("how many are inf or -inf", ABSENT, is_count=True)
    num_saturated: _Bytes = written(
        "how many are the dtype's largest number", ABSENT, is_count=True
    )
    num_zero: _Bytes = written("how many are 0", ABSENT, is_count=True)
    left_out: Count = written(
        "how many entries have no column: those beyond 65,536, or for which the file "
        "had no room",
        ABSENT,
    )

    def __post_init__(self) -> None:
        """Checks that `num` is what the columns hold, before anything has that size."""
        extremes = _given(self, EXTREMES)
        counts = _given(self, COUNTS)
        for column in extremes:
            if len(column) not in (4 * self.num, 8 * self.num):
                raise ValueError(f"{len(column)} bytes of {self.num} magnitudes")
        for column in counts:
            if len(column) not in (0, 8 * self.num):
                raise ValueError(f"{len(column)} bytes of {self.num} counts")
        if self.num and not any((*extremes, *counts)):
            raise ValueError(f"{self.num} entries, and no number of any")


def _columns(is_count: bool) -> tuple[str, ...]:
    declared = fields_of(Columns).items()
    return tuple(n for n, each in declared if each.more.get("is_count") is is_count)


EXTREMES, COUNTS = _columns(False), _columns(True)
COLUMNS = EXTREMES + COUNTS


def _given(columns: Columns, names: Sequence[str]) -> list[bytes]:
    found = (getattr(columns, name) for name in names)
    return [each for each in found if isinstance(each, bytes)]


class StepsLine(Written, kind="steps", of=RecordStep):
    """A step, or several that are folded."""

    level: Count = written("how often it was folded", 0)
    models: list[Columns] = written("the columns of each")

    def __post_init__(self) -> None:
        """Checks that it is a step at all."""
        step: Any = self
        if not step.count or step.last < step.first:
            raise ValueError(f"{step.count} steps from {step.first} to {step.last}")


KINDS = (FlightRecordLine, EntriesLine, StepsLine)
