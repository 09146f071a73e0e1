"""Scripted incidents of many ranks, over `simulated_ranks`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from simulated_ranks import Network, run_ranks
from torch import nn

from overflow_fast import Log, OverflowGuard, Record

BAD_STEP = 1
LAST_STEP = 2


@dataclass
class Script:
    """What happens to whom, in step 1.

    Attributes:
        bad: The ranks with an inf in their batch.
        dying: The ranks that die before they agree.
        far: The ranks that a split of the network cuts off.
        behind: The rank that has not made one step of the others.
        collect: The guard's.
    """

    bad: set[int] = field(default_factory=set)
    dying: set[int] = field(default_factory=set)
    far: set[int] = field(default_factory=set)
    behind: int = -1
    collect: str = "rank0"


@dataclass
class Seen:
    """What one rank has come to.

    Attributes:
        headline: That of its last report, or "".
        cause: The cause that the replay named, or "".
        repeats: The earlier run with the same incident, or "".
        num_skipped: How many steps it skipped.
        weights: Its weights' sum in the end.
        error: The text of the error that ended it, or "".
        failures: How often the guard itself failed.
        seconds: The time of the bad step.
    """

    headline: str = ""
    cause: str = ""
    repeats: str = ""
    num_skipped: int = 0
    weights: float = 0.0
    error: str = ""
    failures: int = 0
    seconds: float = 0.0


class _Dead(Exception):
    """A rank that has died."""


def play(script: Script, network: Network, folder: Path) -> list[Seen | Exception]:
    """Trains three steps on all ranks, by the script; all files go to the folder."""

    def be(rank: int) -> Seen:
        model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1))
        for parameter in model.parameters():  # threads share the random state
            nn.init.constant_(parameter, 0.25)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = OverflowGuard(
            *(model, optimizer, "skip"),
            process_group=dist.group.WORLD,
            log=Log(folder / "guard.jsonl", ranks=script.collect),
            record=Record(folder / "run.ofr", ranks=script.collect),
            evidence=folder / "evidence",
        )
        seen = Seen()
        try:
            for step in range(LAST_STEP + 1):
                begin = time.perf_counter()
                _step(script, network, rank, step, guard, model, optimizer)
                if step == BAD_STEP:
                    seen.seconds = time.perf_counter() - begin
        except RuntimeError as error:
            seen.error = str(error)
        guard.remove()
        report = guard.last_report
        if report is not None:
            seen.headline, seen.repeats = report.headline(), report.repeats
            if report.explanation is not None:
                seen.cause = report.explanation.cause
        seen.num_skipped = guard.num_skipped
        seen.failures = guard.coverage().failures
        seen.weights = float(sum(p.detach().sum() for p in model.parameters()))
        return seen

    return run_ranks(network, be)


def _step(
    script: Script,
    network: Network,
    rank: int,
    step: int,
    guard: OverflowGuard,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    batch = torch.ones(2, 4)
    if step == BAD_STEP:
        if rank in script.dying:
            network.lose(rank)
            raise _Dead
        if script.far:
            network.split(script.far)
        if rank in script.bad:
            batch[0, 0] = torch.inf
        if rank == script.behind:
            guard.step = step - 1
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    """The number and bytes of files: logs, records, evidence."""
    found = {"log": (0, 0), "record": (0, 0), "evidence": (0, 0)}
    for path in folder.rglob("*"):
        if path.is_file():
            kind = {".jsonl": "log", ".ofr": "record"}.get(path.suffix, "evidence")
            count, size = found[kind]
            found[kind] = count + 1, size + path.stat().st_size
    return found


def bytes_of_lines(folder: Path) -> dict[str, float]:
    """The mean length of a log's lines: of clean steps, and of bad ones."""
    lengths: dict[str, list[int]] = {"clean": [], "bad": []}
    for path in folder.glob("guard*.jsonl"):
        for text in path.read_text().splitlines():
            line: dict[str, Any] = json.loads(text)
            if line["kind"] == "step":
                lengths["clean" if line["is_clean"] else "bad"].append(len(text) + 1)
    return {kind: sum(each) / max(1, len(each)) for kind, each in lengths.items()}


Scenario = Callable[[int], Script]
SCENARIOS: dict[str, Scenario] = {
    "quiet": lambda world: Script(),
    "one bad rank": lambda world: Script(bad={world // 2}),
    "most ranks bad": lambda world: Script(bad=set(range(world - world // 5, 0, -1))),
    "ranks die": lambda world: Script(bad={0}, dying={world // 2, world - 1}),
    "network split": lambda world: Script(bad={0}, far=set(range(world // 2))),
    "one step behind": lambda world: Script(behind=world - 1),
}
