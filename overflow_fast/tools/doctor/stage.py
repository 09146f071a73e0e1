"""The words of an examination: its settings, stages, outcomes and findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...base.text import some

FINE, WARNING, BROKEN = 0, 1, 2  # severities are exit statuses
STATES = {FINE: "fine", WARNING: "warning", BROKEN: "broken"}


@dataclass(frozen=True)
class ExaminationSettings:
    """The limits of an examination, in seconds where nothing else is said.

    Attributes:
        limit: The time that a stage may take; then it is given up.
        grace: The further time that the answers of other ranks may take.
        backend: The backend of the collectives; None: nccl with GPUs, else gloo.
    """

    limit: float = 30.0
    grace: float = 10.0
    backend: str | None = None


@dataclass(frozen=True)
class Finding:
    """A fault, or a sign of one.

    Attributes:
        stage: The name of the stage that found it.
        severity: 1, a warning: a run works, but with a doubt; 2: broken.
        ranks: The ranks that are named, in order; empty if none can be.
        text: The sentence.
    """

    stage: str
    severity: int
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class StageSite:
    """The place where a stage runs: one rank, in a process that may be given up.

    Attributes:
        rank: The rank.
        members: The ranks that take part, in order; a group's ranks are positions here.
        device: The device of this rank.
        settings: The settings.
        note: Called with what comes next, so that a rank that hangs says in what.
    """

    rank: int
    members: Sequence[int]
    device: torch.device
    settings: ExaminationSettings
    note: Callable[[str], None]

    @property
    def position(self) -> int:
        """This rank's number in the process group."""
        return list(self.members).index(self.rank)


Hosts = Mapping[int, str]  # the name of each rank's host


def nothing_to_judge(data: Mapping[int, Any], hosts: Hosts) -> list[Finding]:
    """The judgement of a stage that finds only who does not come out of it."""
    return []


@dataclass(frozen=True)
class Stage:
    """A part of the examination.

    Attributes:
        name: Its name.
        run: Runs on each rank in a process of its own, and returns plain data.
        judge: Makes findings from the data of the ranks, by rank; a pure function.
        needs_group: It runs collectives.
    """

    name: str
    run: Callable[[StageSite], Any]
    judge: Callable[[Mapping[int, Any], Hosts], list[Finding]] = nothing_to_judge
    needs_group: bool = True


@dataclass(frozen=True)
class StageOutcome:
    """The end of a stage on one rank.

    Attributes:
        state: "done"; "error", it raised; "hung", it did not end within the limit;
            "died"; or "silent", no answer came.
        number: The number of notes that it had made.
        doing: The last of them.
        detail: The error or the exit status.
        data: The data, if it is done.
        seconds: The time that it took.
    """

    state: str
    number: int = 0
    doing: str = ""
    detail: str = ""
    data: Any = None
    seconds: float = 0.0


@dataclass(frozen=True)
class StageResult:
    """A stage that is over, or was left out.

    Attributes:
        name: Its name.
        state: "fine", "warning", "broken" or "left out".
        seconds: The time that it took.
        ranks: The number of ranks that took part.
    """

    name: str
    state: str
    seconds: float = 0.0
    ranks: int = 0


def named(ranks: Sequence[int], hosts: Hosts) -> str:
    """Names ranks with their hosts: "rank 3 (node1)"; of many the first eight."""
    shown = (f"{r} ({hosts[r]})" if r in hosts else str(r) for r in ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {some(shown, 8)}"
