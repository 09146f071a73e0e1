"""What grows with what: modules, tensors in one list, forwards of a step, steps."""

from __future__ import annotations

import gc
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import Results, bytes_of, progress, silence, threads
from timing import QUICK, cpu_time
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard, read_record
from overflow_fast.options import Log, Record

MODULES = (100, 1_000, 10_000, 20_000, 100_000)
TENSORS = (10, 1_000, 100_000, 1_000_000)
FORWARDS = (1, 10, 100, 1_000)
STEPS = (100, 1_000, 10_000, 100_000)
MIB = 4  # of the log and of the record
REPEATS = 5
WIDTH = 8
COLUMNS = [
    *("what", "count", "guard made s", "bare step s", "guarded step s"),
    *("us each", "bad step s", "judged s", "log MiB", "record MiB", "read s"),
]
NOTES = (
    "CPU time of the process, one thread, the median of 5 steps of SGD with and "
    "without a guard in turn. `us each`: what the guard adds to a step for each "
    "module, tensor, forward or step. `bad step`: judged, reported and raised, without "
    "an explanation (`explain=False`); `judged`: of it `optimizer.step()`. Modules: "
    "linear layers of width 8 in blocks of 9, batch 4. Tensors: a list of tensors of "
    "16 numbers that one module hands to another. Forwards: of a model of 8 such "
    "layers, before one backward. Steps: of one layer, with a log and a record of at "
    "most 4 MiB each; `guarded step` is the last thousand's median, `read`: reading "
    "the record back."
)


class Blocks(nn.Module):
    """Linear layers in a row, in blocks of 9: about as many modules as asked for."""

    def __init__(self, modules: int) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(modules * 9 // 10)]
        blocks = [nn.Sequential(*layers[i : i + 9]) for i in range(0, len(layers), 9)]
        self.blocks = nn.Sequential(*blocks)
        for each in layers:
            nn.init.orthogonal_(each.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


class Split(nn.Module):
    """Makes a list of tensors of 16 numbers."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return list(x.unbind())


class Join(nn.Module):
    """Takes a list of tensors."""

    def forward(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(parts).mean(0)


class Lists(nn.Module):
    """Hands a list of tensors from one module to another."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.split, self.join = nn.Linear(16, 16), Split(), Join()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(self.join(self.split(x)))


class Training:
    """A model, and steps of it.

    Args:
        model: The model.
        x: Its input.
        forwards: How many forwards a step has.

    Attributes:
        judged: The CPU time of the last step of the optimizer, guard included.
    """

    judged: float

    def __init__(self, model: nn.Module, x: torch.Tensor, forwards: int = 1) -> None:
        self.model, self.x, self.forwards = model, x, forwards
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step(self, x: torch.Tensor | None = None) -> None:
        x = self.x if x is None else x
        loss = sum(self.model(x).square().mean() for _ in range(self.forwards))
        loss.backward()
        begin = time.process_time()
        try:
            self.optimizer.step()
        finally:
            self.judged = time.process_time() - begin
        self.optimizer.zero_grad()

    def guard(self, **options: Any) -> OverflowGuard:
        return OverflowGuard(self.model, self.optimizer, explain=False, **options)


def cpu_seconds(function: Callable[[], object]) -> float:
    """The CPU time that a call takes, with no garbage of earlier ones."""
    gc.collect()
    return cpu_time(function)


def measured(what: str, count: int, make: Callable[[], Training]) -> dict[str, Any]:
    """A row: steps with and without a guard in turn, and a bad one."""
    progress(f"{count} {what}")
    training, bare = make(), make()
    kept = list[OverflowGuard]()
    made = cpu_seconds(lambda: kept.append(training.guard()))
    times: dict[str, list[float]] = {"guarded": [], "bare": []}
    for each in (training, bare):
        each.step()
    for _ in range(REPEATS):
        times["guarded"].append(cpu_seconds(training.step))
        times["bare"].append(cpu_seconds(bare.step))
    guarded, alone = (statistics.median(times[name]) for name in ("guarded", "bare"))

    def fail() -> None:
        try:
            training.step(torch.full_like(training.x, torch.nan))
        except NonFiniteError:
            return
        raise AssertionError("the bad step was not found")

    with silence():
        bad = cpu_seconds(fail)
    kept[0].remove()
    return {
        "what": what,
        "count": f"{count:,}",
        "guard made s": f"{made:.3g}",
        "bare step s": f"{alone:.3g}",
        "guarded step s": f"{guarded:.3g}",
        "us each": f"{(guarded - alone) / count * 1e6:.2f}",
        "bad step s": f"{bad:.3g}",
        "judged s": f"{training.judged:.3g}",
        "seconds": times | {"made": made, "bad": bad},
    }


def recorded(count: int) -> dict[str, Any]:
    """A row: steps that a log and a record keep."""
    progress(f"{count} steps")
    training = Training(nn.Linear(WIDTH, 1), torch.randn(4, WIDTH))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = Log(folder / "run.jsonl", mib=MIB, keep=1)
        guard = training.guard(log=log, record=Record(folder / "run.ofr", mib=MIB))
        times = [cpu_time(training.step) for _ in range(count)][-1_000:]
        guard.remove()
        read = cpu_time(lambda: read_record(folder / "run.ofr"))
        logs = bytes_of(folder.glob("run*.jsonl*"))
        record = (folder / "run.ofr").stat().st_size
    return {
        "what": "steps",
        "count": f"{count:,}",
        "guarded step s": f"{statistics.median(times):.3g}",
        "log MiB": f"{logs / 2**20:.2f}",
        "record MiB": f"{record / 2**20:.2f}",
        "read s": f"{read:.3g}",
    }


def rows() -> Iterator[dict[str, Any]]:
    few = 2 if QUICK else None
    for n in MODULES[:few]:
        x = torch.randn(4, WIDTH)
        yield measured("modules", n, lambda n=n, x=x: Training(Blocks(n), x))
    for n in TENSORS[:few]:
        x = torch.randn(n, 16)
        yield measured("tensors in a list", n, lambda x=x: Training(Lists(), x))
    for n in FORWARDS[:few]:
        x = torch.randn(4, WIDTH)
        yield measured("forwards", n, lambda n=n, x=x: Training(Blocks(9), x, n))
    for n in STEPS[:few]:
        yield recorded(n)


def main() -> None:
    logging.getLogger("overflow_fast").setLevel(logging.CRITICAL)
    results = Results("scale", "What grows with what", NOTES, COLUMNS)
    with threads(1):
        for row in rows():
            results.add(row)
    results.finish()


if __name__ == "__main__":
    main()
