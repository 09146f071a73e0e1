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

from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from ...base.types import TensorPath
from ..files.fields import Count, Index, Number, documented, fields_of, meaning
from ..files.reading import FileError
from ..report.log_lines import OfRun
from .record_step import OfSteps

# The version of the lines: docs/formats.md.
RECORD_SCHEMA = 1
KIND = "flight_record"  # of the first line
BEGINNING = b'{"kind": "flight_record"'


class RecordError(FileError):
    """A file that cannot be read as a flight record; says why."""


class LineSpan(NamedTuple):
    """Where a line of steps lies in its file, or several that are to be one line."""

    offset: int
    length: int
    level: int


class EntryName(Struct, frozen=True, kw_only=True):
    """A tensor that was looked at in many steps, as a line has it."""

    module: Annotated[
        str, meaning("the name of the module; empty for the root, or none")
    ]
    class_name: Annotated[str, meaning("the module's class, or nothing")] = field(
        name="class"
    )
    kind: Annotated[
        str,
        meaning(
            '"output", "grad_output", "weight", "buffer", "gradient", '
            '"optimizer_state", or "recorded" for a loss or what `record()` was given; '
            '"unknown" where its line was damaged'
        ),
    ]
    label: Annotated[
        str, meaning("which tensor of the module, such as `output[0]` or `weight`")
    ]
    dtype: Annotated[str, meaning('its dtype, such as "float16"')]
    limit: Annotated[Number, meaning("the largest finite number of the dtype")]
    numel: Annotated[Count, meaning("how many elements it had when it was first seen")]


@documented
class RecordEntry(EntryName, frozen=True, kw_only=True):
    """A tensor that was looked at in many steps."""

    model: Annotated[int, meaning("which of the guard's models it is of")]

    @property
    def path(self) -> TensorPath:
        """Where the tensor is; `str()` of it is its name on pages."""
        return TensorPath.from_label(self.module, self.kind, self.label)

    def to_dict(self) -> dict[str, Any]:
        """The fields by their names, its model first."""
        return {"model": self.model, **msgspec.structs.asdict(self)}


class FlightRecordLine(OfRun, tag_field="kind", tag=KIND, kw_only=True):
    """The first line. Nothing in it is needed to read the others."""

    schema: Annotated[int, meaning("the version of the format")]
    byteorder: Annotated[
        Literal["little", "big"] | UnsetType, meaning("that of the columns")
    ] = UNSET
    devices: Annotated[list[str] | UnsetType, meaning("those of the parameters")] = (
        UNSET
    )


class EntriesLine(Struct, tag_field="kind", tag="entries", kw_only=True):
    """The names of entries, when there are new ones."""

    model: Annotated[Index, meaning("the index of their model")]
    first: Annotated[Index, meaning("the index of the first of them")]
    entries: Annotated[
        list[EntryName], meaning("they, in the order in which they first came")
    ]


_Column = bytes | UnsetType


class Columns(Struct, kw_only=True):
    """The columns of one model, as packed numbers in base64."""

    num: Annotated[Index, meaning("how many entries they have")]
    abs_min: Annotated[_Column, meaning("the smallest magnitude of each")] = UNSET
    abs_max: Annotated[_Column, meaning("the largest magnitude of each")] = UNSET
    num_nan: Annotated[_Column, meaning("how many elements are nan")] = UNSET
    num_inf: Annotated[_Column, meaning("how many are inf or -inf")] = UNSET
    num_saturated: Annotated[
        _Column, meaning("how many are the dtype's largest number")
    ] = UNSET
    num_zero: Annotated[_Column, meaning("how many are 0")] = UNSET
    left_out: Annotated[
        Count | UnsetType,
        meaning(
            "how many entries have no column: those beyond 65,536, or for which the "
            "file had no room"
        ),
    ] = UNSET

    def __post_init__(self) -> None:
        """Checks that `num` is what the columns hold, before anything has that size."""
        num, has_numbers = self.num, False
        for names, narrow, what in (EXTREMES, 4, "magnitudes"), (COUNTS, 0, "counts"):
            for name in names:
                column = getattr(self, name)
                if column is UNSET:
                    continue
                if len(column) not in (narrow * num, 8 * num):
                    raise ValueError(f"{len(column)} bytes of {num} {what}")
                has_numbers |= bool(column)
        if num and not has_numbers:
            raise ValueError(f"{num} entries, and no number of any")


EXTREMES = tuple(name for name in fields_of(Columns) if name.startswith("abs_"))
COUNTS = tuple(name for name in fields_of(Columns) if name.startswith("num_"))
COLUMNS = EXTREMES + COUNTS


class StepsLine(OfSteps, tag_field="kind", tag="steps", kw_only=True):
    """A step, or several that are folded."""

    level: Annotated[Count, meaning("how often it was folded")] = 0
    models: Annotated[list[Columns], meaning("the columns of each")]

    def __post_init__(self) -> None:
        """Checks that it is a step at all."""
        if not self.count or self.last < self.first:
            raise ValueError(f"{self.count} steps from {self.first} to {self.last}")


KINDS = (FlightRecordLine, EntriesLine, StepsLine)
