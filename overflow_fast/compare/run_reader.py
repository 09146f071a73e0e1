"""Reads the recordings of all ranks of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..files.reading import FileError, lines_of, open_regular
from ..files.tensor_files import open_tensors
from ..text import counted
from .run_rows import SCHEMA, Row

if TYPE_CHECKING:
    from .recording_schema import HeadLine


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
    row: Row
    folder: Path | None = None
    unread: dict[str, str] = field(default_factory=dict)

    def load(self) -> torch.Tensor | None:
        """Reads the tensor; None if its fingerprint is all there is."""
        if self.folder is None or not self.row.file:
            return None
        path = self.folder / self.row.file
        try:
            tensor = self._read(path)
        except (OSError, FileError, ImportError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            self.unread.setdefault(str(path), str(why))
            return None
        if tensor.shape != self.row.local or str(tensor.dtype)[6:] != self.row.dtype:
            self.unread.setdefault(str(path), "its tensors are not those of the rows")
            return None
        return tensor

    def _read(self, path: Path) -> torch.Tensor:
        name = str(self.row.order if self.row.same is None else self.row.same)
        with open_tensors(path) as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor


@dataclass
class RankStep:
    """A step of one rank: its rows in the order of execution, and its settings."""

    rank: int
    modes: dict[str, Any]
    sources: list[Source]


@dataclass
class Run:
    """The recordings of a run.

    Attributes:
        name: Its folder.
        heads: The first line of each rank's file.
        steps: The ranks' parts of each step, by its number.
        damaged: Sentences on what could not be read.
        unread: The files whose tensors could not be read so far, and why.
    """

    name: str
    heads: list[dict[str, Any]]
    steps: dict[int, list[RankStep]]
    damaged: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """How many ranks have recorded."""
        return len(self.heads)


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Reads the folder of a recording. A rank's file that is damaged is left out.

    Args:
        folder: The folder.

    Raises:
        RecordingError: If there is no recording that can be read.
        ImportError: If msgspec is not installed.
    """
    path = Path(folder)
    files = sorted(path.glob("rank-*.jsonl"), key=_rank_of)
    if not files:
        raise RecordingError(
            f"{path} holds no recording (no rank-0.jsonl) and no dump of msprobe"
        )
    run, left_out = Run(str(path), [], {}), list[str]()
    for file in files:
        try:
            _read_rank(run, file)
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


def _read_rank(run: Run, file: Path) -> None:
    """Adds a rank to a run.

    Raises:
        OSError: If its file cannot be read.
        RecordingError: If it is no recording; nothing is added then.
    """
    from ..files.schema import plain
    from .recording_schema import LINES, HeadLine, RowLine, StepLine

    rows: dict[int, list[Row]] = {}
    steps, head, num_bad = list[tuple[int, RankStep]](), None, 0
    with open_regular(file) as lines:
        for text in lines_of(lines):
            if head is None:
                head = _head_of(text, file)
                continue
            try:
                line = LINES.decode(text) if text is not None else None
                num_bad += text is None
            except FileError:
                num_bad += 1
                continue
            if isinstance(line, RowLine):
                rows.setdefault(line.step, []).append(Row.of_line(line))
            elif isinstance(line, StepLine):
                sources = _sources(rows.pop(line.step, []), head.rank, file.parent, run)
                step = RankStep(head.rank, plain(line), sources)
                steps.append((line.step, step))
            else:
                num_bad += isinstance(line, HeadLine)
    if head is None:
        raise RecordingError(f"{file} is empty")
    if any(head.rank == other["rank"] for other in run.heads):
        raise RecordingError(f"{file} is of rank {head.rank}, as is another file")
    run.heads.append(plain(head))
    for number, step in steps:
        run.steps.setdefault(number, []).append(step)
    if num_bad or rows:
        what = counted(num_bad, "damaged line") if num_bad else _NOT_WHOLE
        verb = "are" if num_bad > 1 else "is"
        run.damaged.append(f"{file} has {what}, which {verb} left out.")


_NOT_WHOLE = "a step that is not whole"


def _head_of(text: bytes | None, file: Path) -> HeadLine:
    """The first line of a rank's file.

    Raises:
        RecordingError: If it is not that of a recording that can be read.
    """
    from ..files.schema import Head, decode
    from .recording_schema import HeadLine

    try:
        head = Head() if text is None else decode(text, Head)
    except FileError:
        head = Head()
    if text is None or head.kind != "recording":
        raise RecordingError(f"{file} is not a recording")
    schema = head.schema
    if not isinstance(schema, int):
        raise RecordingError(f"{file} has no number as its schema")
    if schema > SCHEMA:
        raise RecordingError(
            f"{file} has schema {schema}, newer than {SCHEMA}: it needs a newer "
            "overflow_fast"
        )
    try:
        return decode(text, HeadLine)
    except FileError as error:
        raise RecordingError(f"{file}: its first line is damaged: {error}") from error


def _sources(rows: Sequence[Row], rank: int, folder: Path, run: Run) -> list[Source]:
    by_order = {row.order: row for row in rows}
    # From the first on: what a row shares has no further one to look for then.
    for row in sorted(rows, key=lambda row: row.order):
        shared = by_order.get(row.same) if row.same is not None else None
        while shared is not None and shared.same is not None:
            shared = by_order.get(shared.same)
        if shared is not None:
            row.summary, row.file, row.same = shared.summary, shared.file, shared.order
    return [Source(rank, row, folder, run.unread) for row in rows]
