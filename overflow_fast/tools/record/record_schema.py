"""The schema of a flight record's lines: docs/formats.md."""

from __future__ import annotations

from typing import Literal, TypeAlias

from ...guard.files.schema import (
    UNSET,
    Count,
    Index,
    Lines,
    Number,
    Seconds,
    StepNumber,
    Struct,
    Time,
    UnsetType,
    field,
)

_Bytes: TypeAlias = bytes | UnsetType


class FlightRecordLine(Struct, tag_field="kind", tag="flight_record"):
    """The first line. Nothing in it is needed to read the others."""

    schema: int
    run: str | UnsetType = UNSET
    time: Time | UnsetType = UNSET
    started: str | UnsetType = UNSET
    host: str | UnsetType = UNSET
    pid: Count | UnsetType = UNSET
    rank: Index | UnsetType = UNSET
    world_size: Index | UnsetType = UNSET
    overflow_fast: str | UnsetType = UNSET
    torch: str | UnsetType = UNSET
    python: str | UnsetType = UNSET
    models: list[str] | UnsetType = UNSET
    dtypes: list[str] | UnsetType = UNSET
    policy: str | UnsetType = UNSET
    byteorder: Literal["little", "big"] | UnsetType = UNSET
    devices: list[str] | UnsetType = UNSET


class ColumnName(Struct):
    """The name of a column."""

    module: str
    class_name: str = field(name="class")
    kind: str
    label: str
    dtype: str
    limit: Number
    numel: Count


class EntriesLine(Struct, tag_field="kind", tag="entries"):
    """The names of columns, from the `first` on."""

    model: Index
    first: Index
    entries: list[ColumnName]


class Columns(Struct):
    """The columns of one model, as packed numbers."""

    num: Index
    abs_min: _Bytes = UNSET
    abs_max: _Bytes = UNSET
    num_nan: _Bytes = UNSET
    num_inf: _Bytes = UNSET
    num_saturated: _Bytes = UNSET
    num_zero: _Bytes = UNSET
    left_out: Count | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Checks that `num` is what the columns hold, before anything has that size."""
        extremes, counts = (
            (self.abs_min, self.abs_max),
            (*(self.num_nan, self.num_inf, self.num_saturated, self.num_zero),),
        )
        for column in extremes:
            if column is not UNSET and len(column) not in (4 * self.num, 8 * self.num):
                raise ValueError(f"{len(column)} bytes of {self.num} magnitudes")
        for column in counts:
            if column is not UNSET and len(column) not in (0, 8 * self.num):
                raise ValueError(f"{len(column)} bytes of {self.num} counts")
        if self.num and not any((*extremes, *counts)):
            raise ValueError(f"{self.num} entries, and no number of any")


class StepsLine(Struct, tag_field="kind", tag="steps"):
    """A step, or several that are folded."""

    first: StepNumber
    last: StepNumber
    count: Count
    time: Time
    models: list[Columns]
    seconds: Seconds | None = None
    guard_seconds: Seconds | None = None
    learning_rate: Number | None = None
    actions: dict[str, Count] = field(default_factory=dict)
    skipped: Count = 0

    def __post_init__(self) -> None:
        """Checks that it is a step at all."""
        if not self.count or self.last < self.first:
            raise ValueError(f"{self.count} steps from {self.first} to {self.last}")


LINES = Lines(FlightRecordLine, EntriesLine, StepsLine)
