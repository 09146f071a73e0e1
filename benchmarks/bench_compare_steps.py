"""How long, and in how much memory, are 2,000 steps of 1,000 modules compared?

Other numbers of steps are arguments: 2,000 take 27 GiB of disk and 40 minutes.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import in_fork, peak, progress, size_text, threads, write
from timing import QUICK
from torch import nn

import overflow_fast

BLOCKS = 250  # of four modules each, the block included
RECORDED = 10  # steps, in the middle of which the learning rates part
COUNTS = (10, 100) if QUICK else (10, 100, 2000)
COLUMNS = [
    *("runs", "steps", "pairs", "bytes of a run", "seconds", "CPU time", "a step"),
    "peak",
]
NOTES = (
    f"A model of {4 * BLOCKS + 1} modules (blocks of LayerNorm, Linear, ReLU, width 8) "
    f"is recorded with fingerprints for {RECORDED} training steps, twice; in the "
    "second run the learning rate is another one from the middle on. For more steps "
    "the recorded ones are written again with other numbers: those before the middle "
    "fill the first half, those behind it the second. `equal`: a run and its copy; "
    "`parting`: equal in the first half, then all rows differ. `seconds` of the clock, "
    "on cores that other processes used too; `a step` of `CPU time`, one thread; "
    "`peak`: what the process holds at most, of which "
)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, width)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.act(self.up(self.norm(x)))
        return result


def record(folder: Path, rate: float) -> None:
    """Records steps; from the middle on with a learning rate of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(BLOCKS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with overflow_fast.recording(folder, model) as run:
        for step in range(RECORDED):
            if step:
                run.step()
            if step == RECORDED // 2 - 1:
                optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()


def file_of(folder: Path, step: int) -> Path:
    return folder / f"rank-0.step-{step}.jsonl"


def lengthened(folder: Path, target: Path, num: int) -> None:
    """Writes a recording of so many steps, of those that a folder has."""
    middle = RECORDED // 2
    halves = range(middle), range(middle, RECORDED)
    sources = [itertools.cycle(half) for half in halves]
    target.mkdir()
    for number in range(num):
        source = next(sources[number >= num // 2])
        own, new = b'"step": %d,' % source, b'"step": %d,' % number
        data = file_of(folder, source).read_bytes().replace(own, new, 1)
        file_of(target, number).write_bytes(data)


def measured(run: Path, reference: Path) -> dict[str, Any]:
    """Compares two runs in a process of its own."""

    def compare() -> dict[str, Any]:
        before, begin, cpu = peak(), time.perf_counter(), time.process_time()
        found = overflow_fast.compare(run, reference)
        spent = time.perf_counter() - begin
        first = None if found.first is None else found.first.row.step
        facts = {"seconds": spent, "peak": peak(), "before": before, "first": first}
        return {**facts, "pairs": found.num_pairs, "cpu": time.process_time() - cpu}

    return dict(in_fork(compare))


def rows_of(top: Path, num: int) -> Iterator[dict[str, Any]]:
    folders = {"equal": top / f"equal{num}", "parting": top / f"parting{num}"}
    lengthened(top / "a", top / f"run{num}", num)
    for name, source in (("equal", "a"), ("parting", "b")):
        progress(f"{name}, {num} steps")
        lengthened(top / source, folders[name], num)
        facts = measured(top / f"run{num}", folders[name])
        assert facts["first"] == (None if name == "equal" else num // 2), facts
        size = sum(file.stat().st_size for file in folders[name].iterdir())
        yield {
            "runs": name,
            "steps": num,
            "pairs": f"{facts['pairs']:,}",
            "bytes of a run": size_text(size),
            "seconds": f"{facts['seconds']:.1f} s",
            "CPU time": f"{facts['cpu']:.1f} s",
            "a step": f"{facts['cpu'] / num:.2f} s",
            "peak": size_text(facts["peak"]),
            "before": facts["before"],
        }
        shutil.rmtree(folders[name])
    shutil.rmtree(top / f"run{num}")


def main() -> None:
    rows = []
    with threads(1), tempfile.TemporaryDirectory() as name:
        top = Path(name)
        for folder, rate in (("a", 1e-4), ("b", 1e-3)):
            progress(f"records run {folder}")
            record(top / folder, rate)
        found = overflow_fast.compare(top / "a", top / "b")  # and loads what it needs
        assert found.first is not None and found.first.kind == "update"
        given = [int(each) for each in sys.argv[1:] if each.isdigit()]
        for num in given or COUNTS:
            rows += rows_of(top, num)
    notes = f"{NOTES}{size_text(rows[0]['before'])} before the comparison."
    write("compare-steps", "Comparisons of many steps", notes, rows, COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
