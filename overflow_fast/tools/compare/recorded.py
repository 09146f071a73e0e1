"""A recorded run: its steps, and the tensors of each.

`read_run()` lists the files of a folder, and `RecordedRun.ranks()` reads those of a
step. A file that cannot be read is left out, and `RecordedRun.damage()` says so.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...guard.files.reading import FileError, lines_of, open_regular
from ...guard.files.schema import Lines, decode, head_of
from .recording_schema import KINDS, SCHEMA, FirstLine, RowLine


class RecordingError(FileError):
    """A folder holds no recording that can be read."""


@dataclass
class RecordedTensor:
    """A tensor of a step: a row of a recording, or put together of rows of ranks.

    Attributes:
        line: Its line, or that of its first part with the numbers of the whole.
        rank: The rank whose it is; None if it is of all of them together.
        parts: The rows that it is put together of, if there are several.
    """

    line: RowLine
    rank: int | None = 0
    parts: list[RecordedTensor] = field(default_factory=list)

    @property
    def is_known(self) -> bool:
        """False if the tensor was not read."""
        return self.line.fingerprint is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; of a part, that of the whole."""
        return self.line.shape

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return self.line.shape if self.line.local is None else self.line.local

    @property
    def tensor(self) -> int:
        """The order of the first row with the same tensor."""
        return self.line.order if self.line.same is None else self.line.same

    @property
    def requires_grad(self) -> bool | None:
        """True if it required gradients on any rank; None if that is not known."""
        known = [row.line.requires_grad for row in self.parts or [self]]
        return None if None in known else any(known)


@dataclass
class RankStep:
    """A step of one rank.

    Attributes:
        line: The step's settings.
        rows: Its rows in the order of execution.
    """

    line: FirstLine
    rows: list[RecordedTensor]

    @property
    def rank(self) -> int:
        """The rank."""
        return self.line.rank

    def share_numbers(self) -> RankStep:
        """Gives rows of a tensor that an earlier row has the numbers of that row."""
        first: dict[int, RecordedTensor] = {}
        for row in self.rows:
            line = row.line
            shared = None if line.same is None else first.get(line.same)
            if shared is not None:
                line.take(shared.line)
                line.same = shared.line.order
            first[line.order] = row if shared is None else shared
        return self


_MOST = 2**32  # bytes of a file: some 1,000,000 rows
_lines = functools.cache(lambda: Lines(*KINDS))


@dataclass
class RecordedRun:
    """The recordings of a run.

    Attributes:
        name: Its folder.
        files: The files of each step.
        damaged: The files that could not be read so far, and why, as clauses.
        missing: Sentences on ranks that a step lacks.
    """

    name: str
    files: dict[int, list[Path]]
    damaged: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def ranks(self, step: int) -> list[RankStep]:
        """Reads what the ranks have recorded of a step; a damaged file is left out."""
        found: list[RankStep] = []
        for path in self.files[step]:
            try:
                found.append(self._read(path, step))
            except OSError as error:
                self.damaged.append(f"{path} cannot be read: {error.strerror}")
            except FileError as error:
                self.damaged.append(f"{path} {error}")
        expected = max((each.line.world_size for each in found), default=0)
        text = f"{self.name} has recordings of {len(found)} of {expected} ranks."
        if len(found) < expected and text not in self.missing:
            self.missing.append(text)
        return found

    def _read(self, path: Path, step: int) -> RankStep:
        rank = _number_in(path, "rank")
        with open_regular(path) as file:
            texts = list(lines_of(file, _MOST))
        if not texts:
            raise RecordingError("is empty")
        head = head_of(texts[0])
        if head.kind != "recording" or texts[0] is None:
            raise RecordingError("is not a recording")
        try:
            head.check_schema(SCHEMA)
            line = decode(texts[0], FirstLine)
            rows = [_row(text, rank) for text in texts[1:]]
        except FileError as error:
            raise RecordingError(f"cannot be read: {error}") from error
        orders = [row.line.order for row in rows]
        if (line.step, line.rank, orders) != (step, rank, list(range(line.rows))):
            raise RecordingError("is damaged: it is not whole, or has another name")
        return RankStep(line, rows).share_numbers()

    def damage(self) -> list[str]:
        """Sentences on what could not be read so far."""
        left_out = (f"{clause}. It is left out." for clause in self.damaged)
        return [*left_out, *self.missing]


def _row(text: bytes | None, rank: int) -> RecordedTensor:
    line: Any = None if text is None else _lines().decode(text)
    if not isinstance(line, RowLine):
        raise FileError("a line is no row")
    return RecordedTensor(line, rank)


def read_run(folder: str | os.PathLike[str]) -> RecordedRun:
    """Lists the files of a recording.

    Args:
        folder: The folder.

    Raises:
        RecordingError: If there is no recording.
    """
    path = Path(folder)
    steps: dict[int, list[Path]] = {}
    for each in sorted(path.glob("rank-*.step-*.jsonl"), key=_order_of):
        steps.setdefault(_number_in(each, "step"), []).append(each)
    if not steps:
        raise RecordingError(f"{path} holds no recording (no rank-0.step-0.jsonl)")
    return RecordedRun(str(path), steps)


def _order_of(path: Path) -> tuple[int, int]:
    return _number_in(path, "step"), _number_in(path, "rank")


def _number_in(path: Path, name: str) -> int:
    """A number of a file's name, such as the 3 of `rank-0.step-3.jsonl`; -1: none."""
    found = re.search(rf"\b{name}-(\d{{1,9}})\.", path.name)
    return -1 if found is None else int(found[1])
