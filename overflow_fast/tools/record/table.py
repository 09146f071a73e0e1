"""A flight record that was read: steps, entries, and a number for each of both.

The flow:

1. The lines come as they are in the file, decoded and checked (`reading.py`), or from
   the memory of a guard, which shows a step before it is written.
2. `entries_of()` makes the entries of the lines that name them. A line may be damaged:
   how many entries there are is what the widest line of steps has.
3. Columns are made of the lines when they are asked for, and kept; the numbers of steps
   are made of columns.

The state is the lines. `_begins` has the index of the first entry of each model: in
each line a model's columns may be shorter than they came to be later.
"""

from __future__ import annotations

import collections
import functools
import importlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import asdict

from ...base.text import printable
from ...guard.files.fields import fields_of, said_of
from ...guard.files.schema import plain
from ...guard.record.columns import as_tensor, read_numbers
from ...guard.record.record_lines import (
    COLUMNS,
    COUNTS,
    EntriesLine,
    EntryName,
    RecordEntry,
    StepsLine,
)
from ...guard.record.record_step import OfSteps, RecordStep

# The numbers of a step that pages show, with the words in front of them.
_WORDS = {n: said_of(each, "drawn") for n, each in fields_of(RecordStep).items()}
_IN_ORDER = dict.fromkeys(("loss", "grad_norm", *_WORDS))
DRAWN = {name: words for name in _IN_ORDER if (words := _WORDS[name])}
_OF_ENTRY = ("model", *fields_of(EntryName))
_LOSSES = ("output.loss", "output['loss']")
_MAY_LACK = ("num_saturated", "num_zero")  # columns


def widths_of(steps: Sequence[StepsLine]) -> list[int]:
    """The number of entries of each model, by the widest of its lines."""
    models = max((len(line.models) for line in steps), default=0)
    widths = [0] * models
    for line in steps:
        for i, columns in enumerate(line.models):
            widths[i] = max(widths[i], columns.num)
    return widths


def entries_of(
    heads: Sequence[EntriesLine], widths: Sequence[int]
) -> list[RecordEntry]:
    """The entries of all models; those whose line was damaged are of no known kind.

    Args:
        heads: The lines of entries.
        widths: How many entries each model has; of further ones no step tells.
    """
    by_model = collections.defaultdict[int, list[EntriesLine]](list)
    for line in heads:
        by_model[line.model].append(line)
    return [
        each
        for model, width in enumerate(widths)
        for each in _read_entries(by_model[model], model, width)
    ]


def _read_entries(
    heads: Sequence[EntriesLine], model: int, width: int
) -> list[RecordEntry]:
    found = [
        RecordEntry(
            model=model,
            module="",
            class_name="",
            kind="unknown",
            label=f"entry {i}",
            dtype="unknown",
            limit=math.nan,
            numel=0,
        )
        for i in range(width)
    ]
    for line in heads:
        room = max(0, width - line.first)  # its step may be missing
        for i, each in enumerate(line.entries[:room]):
            own = {**asdict(each), "limit": float(each.limit)}
            found[line.first + i] = RecordEntry(model=model, **own)
    return found


def num_cells(steps: Sequence[StepsLine]) -> int:
    """The number of values in each column of a record: its lines by its entries."""
    return len(steps) * sum(widths_of(steps))


class FlightRecord:
    """A flight record as `read_record()` reads it.

    Iterating yields a dict for each entry of each step in which it was looked at.

    Attributes:
        path: The file.
        run: What is known of the run: `run`, `host`, `rank`, `world_size`, `devices`,
            `torch`, `overflow_fast` and more; empty if the file is.
        entries: The entries in the order in which they first came, which is the order
            of execution.
        is_truncated: Whether the last line was not written to its end.
        num_damaged: How many other lines cannot be read.
    """

    def __init__(
        self, path: Path, lines: list[Any], is_truncated: bool, num_damaged: int
    ) -> None:
        self.path = path
        self.run: dict[str, Any] = plain(lines[0]) if lines else {}
        self.is_truncated = is_truncated
        self.num_damaged = num_damaged
        self._lines = [line for line in lines if isinstance(line, StepsLine)]
        self._heads = heads = [x for x in lines if isinstance(x, EntriesLine)]
        widths = widths_of(self._lines)
        self._begins = [0, *itertools.accumulate(widths)]
        self.entries: list[RecordEntry] = entries_of(heads, widths)

    def __len__(self) -> int:
        """The number of lines of steps."""
        return len(self._lines)

    def __repr__(self) -> str:
        """Writes the file, and how many steps of how many entries it has."""
        steps = sum(line.count for line in self._lines)
        of = ", ".join(self.run.get("models", [])) or "a run"
        num = len(self.entries)
        return printable(f"{self.path}: {of}, {steps} steps of {num} entries")

    def tail(self, num: int) -> FlightRecord:
        """The record of the last lines of steps alone."""
        lines = [self.run, *self._heads, *self._lines[-num:]]
        return FlightRecord(self.path, lines, self.is_truncated, self.num_damaged)

    def followed_by(self, lines: Sequence[Struct]) -> FlightRecord:
        """The record with further lines."""
        whole = [self.run, *self._heads, *self._lines, *lines]
        return FlightRecord(self.path, whole, self.is_truncated, self.num_damaged)

    @functools.cached_property
    def steps(self) -> list[RecordStep]:
        """The steps, the oldest first; the newest have a line each."""
        own, found = fields_of(OfSteps), fields_of(RecordStep)
        scalars = {n: self._largest(n) for n in found if n not in own}
        values: Iterator[dict[str, Any]] = (
            {name: _plain(getattr(line, name)) for name in own}
            | {name: numbers[i] for name, numbers in scalars.items()}
            for i, line in enumerate(self._lines)
        )
        return [RecordStep(**each) for each in values]

    @functools.cached_property
    def values(self) -> Mapping[str, torch.Tensor | None]:
        """Tensors of shape `[len(steps), len(entries)]` by the name of their column.

        "abs_min" and "abs_max" (float64; nan: not looked at, or a nan where "num_nan"
        is not 0), "num_nan", "num_inf", "num_saturated" and "num_zero" (int64; -1: not
        counted). None where a column was never counted. Of several steps it is the
        least "abs_min" and the most of everything else.
        """
        return {name: self._column(name) for name in COLUMNS}

    def headroom_bits(self) -> torch.Tensor:
        """The number of times that each magnitude could double in its dtype.

        Returns:
            float64 of shape `[len(steps), len(entries)]`; -inf where a value was inf or
            nan, nan where the entry was not looked at, inf where all values were 0.
        """
        high = self.values["abs_max"]
        assert high is not None
        limits = torch.tensor(
            [each.limit for each in self.entries], dtype=high.dtype, device="cpu"
        )
        bits = torch.log2(limits / high)
        return bits.masked_fill(self.is_nonfinite(), -math.inf)

    def is_nonfinite(self) -> torch.Tensor:
        """Where a nan or an inf was: bool of shape `[len(steps), len(entries)]`."""
        nans, infs = self.values["num_nan"], self.values["num_inf"]
        assert nans is not None and infs is not None
        return (nans > 0) | (infs > 0)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i, step in enumerate(self.steps):
            rows: dict[str, Any] = {
                name: None if whole is None else whole[i].tolist()
                for name, whole in self.values.items()
            }
            columns = rows["abs_max"], rows["num_nan"], rows["num_inf"]
            for j, (high, nans, infs) in enumerate(zip(*columns, strict=True)):
                if math.isnan(high) and nans <= 0 and infs <= 0:
                    continue
                yield {
                    "step": step.first,
                    "last_step": step.last,
                    **self.entries[j].to_dict(),
                    **{name: _cell(name, row, j) for name, row in rows.items()},
                }

    def to_dataframe(self) -> Any:
        """The record as a `pandas.DataFrame`: a row for each dict of iterating.

        Raises:
            ImportError: If pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise ImportError(
                f"to_dataframe needs pandas: run `pip install pandas` ({error})"
            ) from error
        names = ("step", "last_step", *_OF_ENTRY, *COLUMNS)
        return pandas.DataFrame(iter(self), columns=list(names))

    # How lines become tensors and numbers.

    def _column(self, name: str) -> torch.Tensor | None:
        """The numbers of all lines; None if the column was never counted."""
        are_counts, is_there = name in COUNTS, name not in _MAY_LACK
        whole = torch.full(
            (len(self._lines), len(self.entries)),
            -1 if are_counts else math.nan,
            dtype=torch.int64 if are_counts else torch.float64,
            device="cpu",
        )
        byteorder = self.run.get("byteorder", "little")
        for i, line in enumerate(self._lines):
            for begin, columns in zip(self._begins, line.models, strict=False):
                numbers = read_numbers(columns, name, byteorder)
                if numbers is not None:
                    whole[i, begin : begin + len(numbers)] = as_tensor(numbers)
                    is_there = True
        return whole if is_there else None

    def _largest(self, name: str) -> list[float | None]:
        """The largest magnitude of some entries in each line; nan if one held a nan."""
        indices = self._entries_named(name)
        if not indices:
            return [None] * len(self)
        high, nans = self.values["abs_max"], self.values["num_nan"]
        assert high is not None and nans is not None
        has_nan = (nans[:, indices] > 0).any(1).tolist()
        seen = high[:, indices]
        largest = seen.masked_fill(seen.isnan(), -1.0).amax(1).tolist()
        return [
            math.nan if is_nan else most if most >= 0 else None
            for is_nan, most in zip(has_nan, largest, strict=True)
        ]

    def _entries_named(self, name: str) -> list[int]:
        """The entries that `record()` was given; of the loss, else the root's."""
        named = self._recorded(name)
        if named or name != "loss":
            return named
        whole = "output", "output[0]"
        return self._outputs_of_root(_LOSSES) or self._outputs_of_root(whole)

    def _outputs_of_root(self, labels: Sequence[str]) -> list[int]:
        return [
            i
            for i, each in enumerate(self.entries)
            if each.kind == "output" and not each.module
            if each.numel == 1 and each.label in labels
        ]

    def _recorded(self, label: str) -> list[int]:
        return [
            i
            for i, each in enumerate(self.entries)
            if each.kind == "recorded" and each.label == label
        ]


def _plain(value: Any) -> Any:
    """A value of a line, where a number that is not finite is a string."""
    return float(value) if isinstance(value, str) else value


def _cell(name: str, row: list[Any] | None, index: int) -> Any:
    if row is None or (name in COUNTS and row[index] < 0):
        return None
    return row[index]
