"""Recordings of all ranks of a run, as they are read: one step in memory at a time.

`read_run()` reads the first line of each rank's file, `RecordedRun.steps()` yields its
steps in their order, and `RecordedTensor.load()` reads a tensor where its numbers are
not enough. What cannot be read is left out, and said by `RecordedRun.damage()`.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
import operator
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...base.text import counted, dtype_name
from ...guard.files.reading import FileError, lines_of, open_regular, why_unreadable
from ...guard.files.schema import decode, head_of
from ...guard.files.tensor_files import open_tensors
from .recording_schema import HeadLine, RecordedStepLine, RowLine, decoder
from .summary import Shard, Summary, sums_of
from .tensor_hooks import StepPath

SCHEMA = 1  # of recordings


class RecordingError(FileError):
    """A folder holds no recording that can be read."""


@dataclass
class RecordedTensor:
    """A tensor of a step: a row of a recording, or put together of rows of ranks.

    Attributes:
        line: Its line, or that of its first part; the numbers of it are in `summary`.
        place: Where the tensor was.
        rank: The rank whose it is; None if it is of all of them together.
        summary: Its numbers, or those of the row with the same tensor; None if it was
            not read.
        values: The tensor, of a step in memory alone.
        folder: The folder of its file, of one that was read.
        unread: Gets the files whose tensors cannot be read, and why.
        parts: The rows that it is put together of, if there are several.
    """

    line: RowLine
    place: StepPath
    rank: int | None = 0
    summary: Summary | None = None
    values: torch.Tensor | None = None
    folder: Path | None = None
    unread: dict[str, str] = field(default_factory=dict)
    parts: list[RecordedTensor] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; of a part, that of the whole."""
        return self.line.shape

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return self.line.shape if self.line.local is None else self.line.local

    @property
    def dtype(self) -> str:
        """Its dtype."""
        return self.line.dtype

    @property
    def order(self) -> int:
        """Its number in the step, of the first rank that has it."""
        return self.line.order

    @property
    def tensor(self) -> int:
        """The order of the first row with the same tensor."""
        return self.order if self.line.same is None else self.line.same

    @property
    def requires_grad(self) -> bool | None:
        """True if it required gradients on any rank; None if that is not known."""
        known = [row.line.requires_grad for row in self.parts or [self]]
        return None if None in known else any(known)

    @functools.cached_property
    def part(self) -> Shard | None:
        """Its place in a tensor that ranks share, or None."""
        return None if self.line.part is None else Shard(*self.line.part)

    def load(self) -> torch.Tensor | None:
        """Returns the tensor; None if its fingerprint is all there is."""
        if self.parts:
            return self._joined()
        if self.values is not None or self.folder is None or not self.line.file:
            return self.values
        path = self.folder / self.line.file
        try:
            with open_tensors(path) as file:
                tensor: torch.Tensor = file.get_tensor(str(self.tensor))
        except (OSError, FileError, ImportError) as error:
            self.unread.setdefault(str(path), why_unreadable(error))
            return None
        if tensor.shape != self.local or dtype_name(tensor.dtype) != self.dtype:
            self.unread.setdefault(str(path), "its tensors are not those of the rows")
            return None
        return tensor

    def _joined(self) -> torch.Tensor | None:
        parts = [(row.part, row.load()) for row in self.parts]
        # What the rows claim to be whole is no larger than what there is of it.
        held = sum(0 if values is None else values.numel() for _, values in parts)
        if held < math.prod(self.shape):
            return None
        whole: torch.Tensor | None = None
        for part, values in parts:
            if values is None or part is None:
                return None
            whole = values.new_zeros(self.shape) if whole is None else whole
            pairs = zip(part.offset, values.shape, strict=True)
            whole[tuple(slice(begin, begin + size) for begin, size in pairs)] += values
        return whole


@dataclass
class RankStep:
    """A step of one rank.

    Attributes:
        rank: The rank.
        end: The step's settings.
        rows: Its rows in the order of execution.
    """

    rank: int
    end: RecordedStepLine
    rows: list[RecordedTensor]


def share_summaries(rows: list[RecordedTensor]) -> None:
    """Gives rows of a tensor that an earlier row has the numbers of that row."""
    first: dict[int, RecordedTensor] = {}
    for row in sorted(rows, key=lambda row: row.line.order):
        same = row.line.same
        shared = None if same is None else first.get(same)
        if shared is not None:
            row.summary, row.values = shared.summary, shared.values
            row.line.file, row.line.same = shared.line.file, shared.line.order
        first[row.line.order] = row if shared is None else shared


# Each step has the same places: they are made once. Bounded, as any file may be read.
_place_of = functools.lru_cache(maxsize=2**17)(StepPath)
_place_fields = operator.attrgetter(*(f.name for f in dataclasses.fields(StepPath)))
_lines = functools.cache(decoder)
_MOST = 2**38  # bytes of a rank's file: two minutes of reading


@dataclass
class RankFile:
    """The file of a rank.

    Attributes:
        path: The file.
        head: Its first line.
        num_bad: How many lines of what was read are damaged.
        num_open: How many steps of what was read have rows, but no end.
        unread: The files whose tensors could not be read so far, and why.
    """

    path: Path
    head: HeadLine
    num_bad: int = 0
    num_open: int = 0
    unread: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._folder = self.path.parent

    @classmethod
    def opened(cls, path: Path) -> RankFile:
        """Reads the first line.

        Raises:
            OSError: If the file cannot be read.
            RecordingError: If it is no recording.
        """
        with open_regular(path) as file:
            text = next(lines_of(file, _MOST), b"")
        if text == b"":
            raise RecordingError(f"{path} is empty")
        head = head_of(text)
        if text is None or head.kind != "recording":
            raise RecordingError(f"{path} is not a recording")
        try:
            head.check_schema(SCHEMA)
            return cls(path, decode(text, HeadLine))
        except FileError as error:
            raise RecordingError(f"{path} cannot be read: {error}") from error

    def steps(self) -> Iterator[RankStep]:
        """Yields its whole steps; each has a larger number than those before."""
        rows, last = list[RecordedTensor](), -1
        for line in self._decoded():
            is_row = isinstance(line, RowLine)
            if (
                is_row
                and line.step > last
                and (not rows or line.step == rows[0].line.step)
            ):
                rows.append(self._row(line))
            elif isinstance(line, RecordedStepLine) and line.step > last:
                is_of_it = not rows or rows[0].line.step == line.step
                self.num_open += not is_of_it
                share_summaries(rows)
                yield RankStep(self.head.rank, line, rows if is_of_it else [])
                rows, last = [], line.step
            else:
                self.num_bad += 1
        self.num_open += bool(rows)

    def _decoded(self) -> Iterator[Any]:
        try:
            with open_regular(self.path) as file:
                for text in itertools.islice(lines_of(file, _MOST), 1, None):
                    try:
                        line = None if text is None else _lines().decode(text)
                    except FileError:
                        line = None
                    yield line
        except OSError as error:
            why = f"{self.path} cannot be read: {error.strerror}"
            raise RecordingError(why) from error

    def _row(self, line: RowLine) -> RecordedTensor:
        summary, prints = None, line.fingerprint
        if prints is not None:
            low, high, squares = map(float, (line.low, line.high, line.squares))
            counts = line.num_nan, line.num_inf
            summary = Summary(low, high, squares, *counts, sums_of(prints))
            line.fingerprint = None  # the summary has it
        row = RecordedTensor(line, _place_of(*_place_fields(line)), self.head.rank)
        row.summary, row.folder, row.unread = summary, self._folder, self.unread
        return row

    def damage(self) -> Iterator[str]:
        """Sentences on what could not be read so far."""
        if self.num_bad or self.num_open:
            what = counted(self.num_bad, "damaged line") if self.num_bad else _NOT_WHOLE
            verb = "are" if self.num_bad > 1 else "is"
            yield f"{self.path} has {what}, which {verb} left out."
        for path, why in self.unread.items():
            yield (
                f"{path} cannot be read ({why}): its tensors were compared by "
                "fingerprints."
            )


_NOT_WHOLE = "a step that is not whole"


@dataclass
class RecordedRun:
    """The recordings of a run.

    Attributes:
        name: Its folder.
        files: The file of each rank.
        left_out: Sentences on ranks that are left out.
    """

    name: str
    files: list[RankFile]
    left_out: list[str] = field(default_factory=list)

    def steps(self) -> Iterator[tuple[int, list[RankStep]]]:
        """Yields each step's number and what its ranks have recorded."""
        merged = heapq.merge(
            *(file.steps() for file in self.files), key=lambda each: each.end.step
        )
        for number, ranks in itertools.groupby(merged, key=lambda each: each.end.step):
            yield number, sorted(ranks, key=lambda each: each.rank)

    def damage(self) -> list[str]:
        """Sentences on what could not be read so far."""
        return [
            *(text for file in self.files for text in file.damage()),
            *self.left_out,
        ]


def read_run(folder: str | os.PathLike[str]) -> RecordedRun:
    """Opens a recording. A rank's file that is damaged is left out.

    Args:
        folder: The folder.

    Raises:
        RecordingError: If there is no recording that can be read.
    """
    path = Path(folder)
    paths = sorted(path.glob("rank-*.jsonl"), key=_rank_of)
    if not paths:
        raise RecordingError(f"{path} holds no recording (no rank-0.jsonl)")
    run, ranks = RecordedRun(str(path), []), set[int]()
    for each in paths:
        try:
            file = RankFile.opened(each)
            if file.head.rank in ranks:
                rank = file.head.rank
                raise RecordingError(f"{each} is of rank {rank}, as is another file")
        except OSError as error:
            run.left_out.append(f"{each} cannot be read: {error.strerror}")
        except RecordingError as error:
            run.left_out.append(str(error))
        else:
            run.files.append(file)
            ranks.add(file.head.rank)
    if not run.files:
        raise RecordingError(run.left_out[0])
    run.left_out = [f"{why}. That rank is left out." for why in run.left_out]
    expected = max(file.head.world_size for file in run.files)
    if expected > len(run.files):
        run.left_out.append(
            f"{run.name} has recordings of {len(run.files)} of {expected} ranks."
        )
    return run


def _rank_of(path: Path) -> tuple[float, str]:
    number = path.stem.partition("-")[2]
    is_number = number.isdecimal() and len(number) < 10
    return int(number) if is_number else math.inf, path.name
