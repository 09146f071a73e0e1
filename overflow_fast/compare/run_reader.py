"""Reads the recordings of all ranks of a run."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .run_rows import SCHEMA, Row


class RecordingError(ValueError):
    """A folder holds no recording that can be read."""


@dataclass
class Source:
    """Where the values of a row are.

    Attributes:
        rank: The rank that recorded it.
        row: The row, with the numbers of the tensor that it shares.
        load: Returns the tensor; None if it was not kept.
    """

    rank: int
    row: Row
    folder: Path | None = None

    def load(self) -> torch.Tensor | None:
        """Reads the tensor; None if only its fingerprint was kept."""
        if self.folder is None or not self.row.file:
            return None
        from safetensors import safe_open

        name = str(self.row.order if self.row.same is None else self.row.same)
        with safe_open(self.folder / self.row.file, "pt") as file:
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
    """

    name: str
    heads: list[dict[str, Any]]
    steps: dict[int, list[RankStep]]
    damaged: list[str] = field(default_factory=list)

    @property
    def num_ranks(self) -> int:
        """How many ranks have recorded."""
        return len(self.heads)


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Reads the folder of a recording.

    Args:
        folder: The folder.

    Raises:
        RecordingError: If there is no recording that can be read.
    """
    path = Path(folder)
    files = sorted(path.glob("rank-*.jsonl"), key=_rank_of)
    if not files:
        raise RecordingError(
            f"{path} holds no recording (no rank-0.jsonl) and no dump of msprobe"
        )
    run = Run(str(path), [], {})
    for file in files:
        _read_rank(run, file)
    expected = max(int(head.get("world_size", 1)) for head in run.heads)
    if expected > run.num_ranks:
        run.damaged.append(
            f"{run.name} has recordings of {run.num_ranks} of {expected} ranks."
        )
    return run


def _rank_of(path: Path) -> tuple[int, str]:
    number = path.stem.partition("-")[2]
    return (int(number) if number.isdigit() else 1 << 30), path.name


def _read_rank(run: Run, file: Path) -> None:
    rows: dict[int, list[Row]] = {}
    is_first, num_bad = True, 0
    with open(file, encoding="utf-8") as lines:
        for text in lines:
            try:
                line = json.loads(text)
            except ValueError:
                num_bad += 1
                continue
            if is_first:
                _check_head(line, file)
                run.heads.append(line)
                is_first = False
            elif line.get("kind") == "row":
                rows.setdefault(line["step"], []).append(Row.of_plain(line))
            elif line.get("kind") == "step":
                rank = int(run.heads[-1]["rank"])
                sources = _sources(rows.pop(line["step"], []), rank, file.parent)
                step = run.steps.setdefault(line["step"], [])
                step.append(RankStep(rank, line, sources))
    if is_first:
        raise RecordingError(f"{file} is empty")
    if num_bad or rows:
        text = "1 damaged line" if num_bad == 1 else f"{num_bad} damaged lines"
        what = text if num_bad else "a step that is not whole"
        verb = "are" if num_bad > 1 else "is"
        run.damaged.append(f"{file} has {what}, which {verb} left out.")


def _check_head(line: Any, file: Path) -> None:
    if not isinstance(line, dict) or line.get("kind") != "recording":
        raise RecordingError(f"{file} is not a recording")
    if not isinstance(line.get("schema"), int):
        raise RecordingError(f"{file} has no number as its schema")
    if line["schema"] > SCHEMA:
        raise RecordingError(
            f"{file} has schema {line['schema']}, newer than {SCHEMA}: it needs a "
            "newer overflow_fast"
        )


def _sources(rows: list[Row], rank: int, folder: Path) -> list[Source]:
    by_order = {row.order: row for row in rows}
    for row in rows:
        shared = by_order.get(row.same) if row.same is not None else None
        while shared is not None and shared.same is not None:
            shared = by_order.get(shared.same)
        if shared is not None:
            row.summary, row.file, row.same = shared.summary, shared.file, shared.order
    return [Source(rank, row, folder) for row in rows]
