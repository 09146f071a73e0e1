"""The words of an examination: its settings, stages, outcomes and findings."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...base.text import some

NOTE, WARNING, BROKEN = 0, 1, 2  # severities are exit statuses
STATES = {NOTE: "fine", WARNING: "warning", BROKEN: "broken"}
UNJUDGED = "not all judged"  # of a stage with notes alone

Pair = tuple[int, int]


@dataclass(frozen=True)
class ExaminationSettings:
    """The limits of an examination, in seconds where nothing else is said.

    Attributes:
        limit: The time that a stage may take; then it is given up.
        grace: The further time that the answers of other ranks may take.
        late: A rank that arrives this much after half of the ranks is named.
        backend: The backend of the collectives; None: nccl with GPUs, else gloo.
    """

    limit: float = 30.0
    grace: float = 10.0
    late: float = 10.0
    backend: str | None = None


@dataclass(frozen=True)
class Finding:
    """A fault, or a sign of one.

    Attributes:
        stage: The name of the stage that found it.
        severity: 1, a warning: a run works, but slowly or with a doubt; 2: broken; 0, a
            note on what could not be judged.
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
        hosts: The name of each member's host.
        device: The device of this rank.
        settings: The settings.
        note: Called with what comes next, so that a rank that hangs says in what.
        session: A name that no other examination has.
        network: Returns the network that NCCL says it uses, or "".
    """

    rank: int
    members: Sequence[int]
    hosts: Mapping[int, str]
    device: torch.device
    settings: ExaminationSettings
    note: Callable[[str], None]
    session: str
    network: Callable[[], str] = str

    @property
    def position(self) -> int:
        """This rank's number in the process group."""
        return list(self.members).index(self.rank)


Judge = Callable[[Mapping[int, Any], ExaminationSettings], list[Finding]]


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
    judge: Judge
    needs_group: bool = True


@dataclass(frozen=True)
class StageOutcome:
    """The end of a stage on one rank.

    Attributes:
        state: "done"; "error", it raised; "hung", it did not end within the limit;
            "stopped", the same, by a signal; "died"; or "silent", no answer came.
        number: The number of notes that it had made.
        doing: The last of them.
        detail: The error, the signal or the exit status.
        data: The data, if it is done.
        seconds: The time that it took.
        stack: Where it was when it was given up, innermost call first, or "".
    """

    state: str
    number: int = 0
    doing: str = ""
    detail: str = ""
    data: Any = None
    seconds: float = 0.0
    stack: str = ""


@dataclass(frozen=True)
class StageResult:
    """A stage that is over, or was left out.

    Attributes:
        name: Its name.
        state: "fine", "warning", "broken", "not all judged" or "left out".
        seconds: The time that it took.
        ranks: The number of ranks that took part.
    """

    name: str
    state: str
    seconds: float = 0.0
    ranks: int = 0


def hosts_of(data: Mapping[int, Any]) -> dict[int, str]:
    """The hosts of ranks, by what each of them has said."""
    return {rank: each.host for rank, each in data.items()}


def named(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Names ranks with their hosts: "rank 3 (node1)"; of many the first eight."""
    shown = (f"{r} ({hosts[r]})" if r in hosts else str(r) for r in ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {some(shown, 8)}"


def odd_ones(values: Mapping[int, Hashable]) -> tuple[Hashable, list[int]] | None:
    """Finds the ranks whose value differs from that of most.

    Returns:
        The value of most and the odd ranks, in order; all ranks if there is no
        majority. None if all are the same.
    """
    counts = collections.Counter(values.values())
    if len(counts) < 2:
        return None
    most, count = counts.most_common(1)[0]
    if 2 * count <= len(values):
        return None, sorted(values)
    return most, sorted(rank for rank, value in values.items() if value != most)
