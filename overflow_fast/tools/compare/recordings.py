"""Recordings of all ranks of a run, as they are read.

The flow:

1. `read_run()` reads the first line of each rank's file, and finds where the steps are
   in it; of these only their last lines are decoded.
2. `StoredStep.read()` decodes the rows of a step when it is compared, so that memory is
   bounded by one step. Rows whose bytes are those of another run's are not decoded
   again.
3. `Source.load()` reads a tensor when its numbers are not enough.

The state: what cannot be read is left out and said, in `RecordedRun.damaged`, `unread`
and `bad_lines`, and `StoredStep.num_bad`; `SettingsHistory` has the settings that each
step has changed.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from ...base.text import counted, dtype_name, with_progress
from ...guard.files.reading import FileError, lines_of, open_regular, why_unreadable
from ...guard.files.schema import decode, head_of, plain
from ...guard.files.tensor_files import open_tensors
from .recording_schema import HeadLine, RecordedStepLine, RowLine, decoder
from .summary import Shard, Summary, sums_of
from .tensor_hooks import BACKWARD, StepPath

SCHEMA = 1  # of recordings


@dataclass
class RecordedTensor:
    """A row of a recording.

    Attributes:
        line: Its line.
        place: Where the tensor was.
        summary: Its numbers; None if it has those of `same`, or was not read.
    """

    line: RowLine
    place: StepPath
    summary: Summary | None = None

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return self.line.shape if self.line.local is None else self.line.local

    @functools.cached_property
    def part(self) -> Shard | None:
        """Its place in a tensor that ranks share, or None."""
        return None if self.line.part is None else Shard(*self.line.part)


def row_line(
    place: StepPath, tensor: torch.Tensor, step: int, order: int, same: int | None
) -> RowLine:
    """Makes the line of a tensor, without its numbers.

    Args:
        place: Where it is.
        tensor: The tensor.
        step: The number of the step.
        order: Its number in the step, from 0.
        same: The order of an earlier row with the same tensor, or None.
    """
    return RowLine(
        step=step,
        order=order,
        **vars(place),
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        requires_grad=None if place.phase == BACKWARD else tensor.requires_grad,
        same=same,
    )


# Each step has the same places: they are made once. Bounded, as any file may be read.
_place_of = functools.lru_cache(maxsize=2**17)(StepPath)
_place_fields = operator.attrgetter(*(f.name for f in dataclasses.fields(StepPath)))


class RecordingError(FileError):
    """A folder holds no recording that can be read."""


@dataclass
class Source:
    """Where the values of a row are.

    Attributes:
        rank: The rank that recorded it.
        row: The row, with the numbers of the tensor that it shares.
        folder: The folder of its file.
        unread: Gets the files whose tensors cannot be read, and why.
    """

    rank: int
    row: RecordedTensor
    folder: Path | None = None
    unread: dict[str, str] = field(default_factory=dict)

    def load(self) -> torch.Tensor | None:
        """Reads the tensor; None if its fingerprint is all there is."""
        line = self.row.line
        if self.folder is None or not line.file:
            return None
        path = self.folder / line.file
        try:
            tensor = self._read(path)
        except (OSError, FileError, ImportError) as error:
            self.unread.setdefault(str(path), why_unreadable(error))
            return None
        if tensor.shape != self.row.local or dtype_name(tensor.dtype) != line.dtype:
            self.unread.setdefault(str(path), "its tensors are not those of the rows")
            return None
        return tensor

    def _read(self, path: Path) -> torch.Tensor:
        line = self.row.line
        name = str(line.order if line.same is None else line.same)
        with open_tensors(path) as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor


@dataclass
class RankStep:
    """A step of one rank: its rows in the order of execution, and its settings.

    Attributes:
        rank: The rank.
        modes: The settings.
        sources: The rows.
        data: The bytes of the rows in their file; empty if they are of none.
    """

    rank: int
    modes: dict[str, Any]
    sources: list[Source]
    data: bytes = b""

    def read(self, twins: Sequence[RankStep] = ()) -> RankStep:
        """The step itself: of a dump, all steps are read at once."""
        return self


Span = tuple[int, int]  # where bytes of a file begin and end


@dataclass
class StoredStep:
    """A step of one rank, of which only the place in its file is kept.

    Attributes:
        rank: The rank.
        file: Its file.
        spans: Where the step's rows are.
        end: Where its last line is.
        settings: What the lines of all steps of the file say of modules.
        number: How many of these lines there are up to its own.
        run: The run.
        num_bad: How many of its rows were damaged, once it has been read.
    """

    rank: int
    file: Path
    spans: list[Span]
    end: Span
    settings: SettingsHistory
    number: int
    run: RecordedRun
    num_bad: int = 0

    def read(self, twins: Sequence[RankStep] = ()) -> RankStep:
        """Decodes the step.

        Args:
            twins: The same step of another run: rows of equal bytes are not decoded
                again.

        Raises:
            RecordingError: If the file is not what it was when the step was found.
        """
        line, data = self._line(), self._bytes(self.spans)
        modes = {**plain(line), "settings": self.settings.up_to(self.number)}
        twin = next((each for each in twins if each.data == data != b""), None)
        if twin is None:
            rows, self.num_bad = _rows_of(data, line.step)
            _share_summaries(rows)
        else:
            rows = [source.row for source in twin.sources]
        folder, unread = self.file.parent, self.run.unread
        sources = [Source(self.rank, row, folder, unread) for row in rows]
        return RankStep(self.rank, modes, sources, data)

    def _line(self) -> RecordedStepLine:
        data = self._bytes([self.end])
        try:
            return decode(data, RecordedStepLine)
        except FileError as error:
            why = f"{self.file} was changed while it was read"
            raise RecordingError(why) from error

    def _bytes(self, spans: Sequence[Span]) -> bytes:
        try:
            with open_regular(self.file) as file:
                return b"".join([_read_at(file, *span) for span in spans])
        except OSError as error:
            why = f"{self.file} cannot be read: {error.strerror}"
            raise RecordingError(why) from error


def _read_at(file: BufferedReader, begin: int, end: int) -> bytes:
    file.seek(begin)
    return file.read(end - begin)


def _rows_of(data: bytes, step: int) -> tuple[list[RecordedTensor], int]:
    """Decodes the rows of a step, and counts the lines that are none."""
    texts = data.split(b"\n")
    if not texts[-1]:
        texts.pop()
    decoded = [_decoded(text) for text in texts]
    lines = [x for x in decoded if isinstance(x, RowLine) and x.step == step]
    prints = sums_of([x.fingerprint for x in lines if x.fingerprint is not None])
    rows = []
    for line in lines:
        has_numbers = line.fingerprint is not None
        summary = _summary_of(line, next(prints)) if has_numbers else None
        line.fingerprint = None  # the summary has it
        rows.append(RecordedTensor(line, _place_of(*_place_fields(line)), summary))
    return rows, len(texts) - len(rows)


def _summary_of(line: RowLine, sums: torch.Tensor) -> Summary:
    """The numbers of a line that has a fingerprint, which `sums_of()` has read."""
    low, high, squares = map(float, (line.low, line.high, line.squares))
    counts = line.num_nan, line.num_inf
    return Summary(low, high, squares, *counts, sums, line.magnitudes)


def add_numbers(line: RowLine, summary: Summary) -> None:
    """Adds the numbers of its tensor to a line; what `_summary_of()` reads."""
    line.low, line.high, line.squares = summary.low, summary.high, summary.squares
    line.num_nan, line.num_inf = summary.num_nan, summary.num_inf
    line.fingerprint, line.magnitudes = summary.fingerprint, summary.magnitudes


_DAMAGED = object()


_lines = functools.cache(decoder)


def _decoded(text: bytes | None) -> Any:
    """A line of a recording: None if it is passed over, or `_DAMAGED`."""
    try:
        return _DAMAGED if text is None else _lines().decode(text)
    except FileError:
        return _DAMAGED


class SettingsHistory:
    """The plain values of a rank's modules: each step's line has those that changed."""

    def __init__(self) -> None:
        self._changes: list[dict[str, dict[str, str]]] = []
        self._merged: dict[str, dict[str, str]] = {}
        self._number = 0

    def add(self, changes: dict[str, dict[str, str]]) -> int:
        """Adds those of a step's line, and returns how many lines there are."""
        self._changes.append(changes)
        return len(self._changes)

    def up_to(self, number: int) -> dict[str, dict[str, str]]:
        """Merges those of the first so many lines; asked in order, each once."""
        if number < self._number:
            self._merged, self._number = {}, 0
        changes = [each for each in self._changes[self._number : number] if each]
        if changes:
            self._merged = self._merged.copy()
        for each in changes:
            self._merged |= each
        self._number = number
        return self._merged


@dataclass
class RecordedRun:
    """The recordings of a run.

    Attributes:
        name: Its folder.
        heads: The first line of each rank's file.
        steps: The ranks' parts of each step, by its number.
        damaged: Sentences on what could not be read.
        unread: The files whose tensors could not be read so far, and why.
        bad_lines: How many lines of each file are damaged, beside rows of its steps;
            of steps that are not whole there is 0.
        has_forward: Whether a forward was in the steps that were read so far.
    """

    name: str
    heads: list[dict[str, Any]]
    steps: dict[int, list[RankStep | StoredStep]]
    damaged: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    bad_lines: dict[Path, int] = field(default_factory=dict)
    has_forward: bool = False

    @property
    def num_ranks(self) -> int:
        """The number of ranks that have recorded."""
        return len(self.heads)

    def damage(self) -> Iterator[str]:
        """Sentences on what could not be read so far: rows count once decoded."""
        found = dict(self.bad_lines)
        for step in (each for ranks in self.steps.values() for each in ranks):
            if isinstance(step, StoredStep) and step.num_bad:
                found[step.file] = found.get(step.file, 0) + step.num_bad
        for file, num_bad in found.items():
            what = counted(num_bad, "damaged line") if num_bad else _NOT_WHOLE
            verb = "are" if num_bad > 1 else "is"
            yield f"{file} has {what}, which {verb} left out."
        yield from self.damaged


_NOT_WHOLE = "a step that is not whole"


def read_run(folder: str | os.PathLike[str]) -> RecordedRun:
    """Finds the steps of a recording. A rank's file that is damaged is left out.

    A step is decoded when it is compared, so that memory is bounded by one step.

    Args:
        folder: The folder.

    Raises:
        RecordingError: If there is no recording that can be read.
    """
    path = Path(folder)
    files = sorted(path.glob("rank-*.jsonl"), key=_rank_of)
    if not files:
        raise RecordingError(f"{path} holds no recording (no rank-0.jsonl)")
    run, left_out = RecordedRun(str(path), [], {}), list[str]()
    for file in files:
        try:
            _find_steps(run, file)
        except OSError as error:
            left_out.append(f"{file} cannot be read: {error.strerror}")
        except RecordingError as error:
            left_out.append(str(error))
    if not run.heads:
        raise RecordingError(left_out[0])
    run.damaged += [f"{why}. That rank is left out." for why in left_out]
    expected = max(int(head["world_size"]) for head in run.heads)
    if expected > run.num_ranks:
        run.damaged.append(
            f"{run.name} has recordings of {run.num_ranks} of {expected} ranks."
        )
    return run


def _rank_of(path: Path) -> tuple[int, str]:
    number = path.stem.partition("-")[2]
    is_number = number.isdecimal() and len(number) < 10
    return (int(number) if is_number else 1 << 30), path.name


_MOST = 2**38  # bytes of a rank's file: two minutes of reading


def _find_steps(run: RecordedRun, file: Path) -> None:
    """Adds a rank to a run: where its steps are in its file.

    Raises:
        OSError: If its file cannot be read.
        RecordingError: If it is no recording; nothing is added then.
    """
    with open_regular(file) as opened:
        lines = lines_of(opened, _MOST)
        first = next(lines, b"")
        if first == b"":
            raise RecordingError(f"{file} is empty")
        head = _head_of(first, file)
        if any(head.rank == other["rank"] for other in run.heads):
            raise RecordingError(f"{file} is of rank {head.rank}, as is another file")
        found = StepIndex(run, file, head.rank)
        steps = list(with_progress(found.steps(opened, lines), "steps found", None))
    run.heads.append(plain(head))
    for number, step in steps:
        run.steps.setdefault(number, []).append(step)
    if found.num_bad or found.num_open:
        run.bad_lines[file] = found.num_bad


class StepIndex:
    """Finds the steps of a rank's file; a row is decoded when its step is read.

    Args:
        run: The run.
        file: The file.
        rank: The rank.

    Attributes:
        num_bad: How many lines are of no step.
        num_open: How many steps have rows, but no end.
    """

    def __init__(self, run: RecordedRun, file: Path, rank: int) -> None:
        self._run, self._file, self._rank = run, file, rank
        self._spans: dict[int, list[Span]] = {}  # of rows whose step has no end yet
        self._settings = SettingsHistory()
        self.num_bad = 0

    @property
    def num_open(self) -> int:
        """The number of steps that have rows, but no end so far."""
        return len(self._spans)

    def steps(
        self, file: BufferedReader, lines: Iterator[bytes | None]
    ) -> Iterator[tuple[int, StoredStep]]:
        """Yields the steps with their numbers, as they end."""
        begin, start, number = file.tell(), b"", 0
        for text in lines:
            end = file.tell() if text is None else begin + len(text)
            span, begin = (begin, end), end
            if start and text is not None and text.startswith(start):
                self._add_row(number, span)  # as the row before; checked when decoded
                continue
            line = _decoded(text)
            if isinstance(line, RowLine):
                number = line.step
                start = f'{{"kind": "row", "step": {number}, '.encode()
                self._add_row(number, span)
            elif isinstance(line, RecordedStepLine):
                yield line.step, self._ended(line, span)
            elif line is not None:
                self.num_bad += 1

    def _add_row(self, number: int, span: Span) -> None:
        spans = self._spans.setdefault(number, [])
        if spans and spans[-1][1] == span[0]:
            spans[-1] = spans[-1][0], span[1]
        else:
            spans.append(span)

    def _ended(self, line: RecordedStepLine, span: Span) -> StoredStep:
        number = self._settings.add(plain(line).get("settings", {}))
        spans = self._spans.pop(line.step, [])
        return StoredStep(
            self._rank, self._file, spans, span, self._settings, number, self._run
        )


def _head_of(text: bytes | None, file: Path) -> HeadLine:
    """The first line of a rank's file.

    Raises:
        RecordingError: If it is not that of a recording that can be read.
    """
    head = head_of(text)
    if text is None or head.kind != "recording":
        raise RecordingError(f"{file} is not a recording")
    try:
        head.check_schema(SCHEMA)
        return decode(text, HeadLine)
    except FileError as error:
        raise RecordingError(f"{file} cannot be read: {error}") from error


def _share_summaries(rows: Sequence[RecordedTensor]) -> None:
    """Gives rows of a tensor that an earlier row has the numbers of that row."""
    by_order = {row.line.order: row for row in rows}
    # From the first on: what a row shares has no further one to look for then.
    for row in sorted(rows, key=lambda row: row.line.order):
        line, shared = row.line, None
        if line.same is not None:
            shared = by_order.get(line.same)
        while shared is not None and shared.line.same is not None:
            shared = by_order.get(shared.line.same)
        if shared is not None:
            row.summary = shared.summary
            line.file, line.same = shared.line.file, shared.line.order
