"""Does a long run stay within its bounds: memory, files, time of a step."""

from __future__ import annotations

import logging
import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from common import bytes_of, progress, threads, write
from timing import QUICK
from torch import nn

from overflow_fast import OverflowGuard, read_record
from overflow_fast.monitors import Headroom, Saturation, Spikes, Underflow
from overflow_fast.options import Evidence, Log, Record
from overflow_fast.tools.cli.command_line import main as command

STEPS = 2_000 if QUICK else 100_000
ROWS = 10
BAD_EVERY = 1_000
LOG_MIB, RECORD_MIB, EVIDENCE = 2, 4, 4
COLUMNS = [
    *("steps", "us a step", "resident MiB", "log MiB", "record MiB"),
    *("evidence MiB", "evidence folders", "skipped"),
]
NOTES = (
    "A small model (8 linear layers of width 32, batch 16, AdamW, one thread) under a "
    "guard with all that keeps something: log (2 MiB and 3 older files), record "
    "(4 MiB), evidence of 4 steps, spikes, headroom, saturation, underflow. One step "
    "in 1,000 has a nan in its batch, is skipped, and leaves evidence. `us a step`: "
    "the median CPU time of the training thread in the others. `resident`: what the "
    "process holds after these steps. The last row: reading the record back and "
    "drawing its page."
)


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def mib_of(paths: Iterable[Path]) -> float:
    return bytes_of(paths) / 2**20


def run(folder: Path) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    layers = [m for _ in range(8) for m in (nn.Linear(32, 32), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x, y = torch.randn(16, 32), torch.randn(16, 1)
    bad = x.clone()
    bad[3, 5] = torch.nan
    rows = []
    record, evidence = folder / "run.ofr", folder / "evidence"
    guard = OverflowGuard(
        model,
        optimizer,
        "skip",
        log=Log(folder / "run.jsonl", mib=LOG_MIB),
        record=Record(record, mib=RECORD_MIB),
        evidence=Evidence(evidence, keep=EVIDENCE),
        monitors=(Spikes(), Saturation(), Headroom(), Underflow()),
    )
    with guard:
        for row in range(ROWS):
            times = []
            for step in range(row * STEPS // ROWS, (row + 1) * STEPS // ROWS):
                begin = time.thread_time()
                is_bad = step % BAD_EVERY == BAD_EVERY - 1
                loss = (model(bad if is_bad else x) - y).square().mean()
                guard.record(loss=loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if not is_bad:
                    times.append(time.thread_time() - begin)
            rows.append(
                {
                    "steps": f"{(row + 1) * STEPS // ROWS:,}",
                    "us a step": f"{statistics.median(times) * 1e6:.0f}",
                    "resident MiB": f"{resident_mib():.0f}",
                    "log MiB": f"{mib_of(folder.glob('run*.jsonl*')):.2f}",
                    "record MiB": f"{mib_of([record]):.2f}",
                    "evidence MiB": f"{mib_of(evidence.rglob('*')):.2f}",
                    "evidence folders": len(list(evidence.rglob("step-*"))),
                    "skipped": guard.num_skipped,
                }
            )
            progress(str(rows[-1]))
    return [*rows, read_back(record, folder / "page.html")]


def read_back(record: Path, page: Path) -> dict[str, Any]:
    begin = time.perf_counter()
    steps = len(read_record(record).steps)
    read = time.perf_counter() - begin
    begin = time.perf_counter()
    command(["report", str(record), "-o", str(page)])
    drawn = time.perf_counter() - begin
    text = f"{steps:,} lines read in {read:.1f} s, page in {drawn:.1f} s"
    return {"steps": text, "record MiB": f"page {mib_of([page]):.2f}"}


def main() -> None:
    logging.getLogger("overflow_fast").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder, threads(1):
        rows = run(Path(folder))
    write("long-run", "A long run", NOTES, rows, COLUMNS)


if __name__ == "__main__":
    main()
