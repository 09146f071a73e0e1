"""What a flight record adds to a guarded step, and what its file takes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import KEEPS_MEMORY, progress, restart_with, threads, write
from models import ON_CPU, adam, hf, made, step_of, words
from timing import QUICK, cpu_time, race

from overflow_fast import OverflowGuard, read_record
from overflow_fast.guard.record.record_file import RecordFile

COLUMNS = [
    *("model", "entries", "record adds us", "step ms", "share", "bytes a step"),
    *("MiB", "thinned in s", "every steps", "thinning us a step", "share with it"),
]
NOTES = (
    "GPT-2 small on the CPU, its guard with a record beside the same without. The "
    "cost goes with the number of entries and not with their size, and is far below "
    "what a full step varies by. So `record adds` is the median difference of paired "
    "rounds of a model with all of its modules at a width of 24, in CPU time of the "
    "training thread; `step` is the fastest bare step of GPT-2 small (batch 2 x 128, "
    "all threads), `share` one over the other. `thinned in`: how long a thread needs "
    "to write a full file anew, and after how many steps it does so again; `thinning` "
    "counts it as if training waited for all of it. Goal: under 0.3 %. "
    "On a machine that runs other programs meanwhile `step` is longer than it should "
    "be and `share` smaller: bench_guard.py has 993 ms and 1400 ms for the same step."
)
MIB = 1 if QUICK else 64
ROUNDS = 200


def narrow() -> tuple[Any, Any]:
    config = hf.GPT2Config(n_embd=24, vocab_size=64, use_cache=False)
    return hf.GPT2LMHeadModel(config).train(), words(64, (1, 8))


def added_seconds(folder: Path) -> tuple[float, Path]:
    """What a record adds to a step, and the record."""
    model, batch = narrow()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    step = step_of(model, batch, optimizer)
    path = folder / "run.ofr"
    guards = {
        "guard": OverflowGuard(model, optimizer),
        "record": OverflowGuard(model, optimizer, record=path),
    }
    for guard in guards.values():
        guard.disable()

    @contextlib.contextmanager
    def on(name: str) -> Iterator[None]:
        guards[name].enable()
        yield
        guards[name].disable()

    around: dict[str, Callable[[], Any]] = {
        name: (lambda name=name: on(name)) for name in guards
    }
    with threads(1):
        own_time = functools.partial(cpu_time, clock=time.thread_time)
        times = race(dict.fromkeys(guards, step), ROUNDS, 0.05, around, own_time)
    pairs = zip(times["record"], times["guard"], strict=True)
    for guard in guards.values():
        guard.remove()
    return statistics.median(a - b for a, b in pairs), path


def step_seconds() -> float:
    """The fastest bare step of GPT-2 small."""
    model, batch = made(ON_CPU["GPT-2 small"], torch.float32)
    times = race({"bare": step_of(model, batch, adam(model))}, 5)
    return min(times["bare"])


def thinning(record: Path, folder: Path) -> dict[str, Any]:
    """Fills a file with a record's lines until it was thinned twice."""
    lines = record.read_bytes().splitlines(keepends=True)
    heads, steps = b"".join(lines[:2]), lines[2:]
    file = RecordFile(folder / "full.ofr", 1000, MIB * 2**20)
    seconds, ends = [], []
    for number, line in enumerate(itertools.cycle(steps)):
        file.append(heads if number == 0 else b"", line)
        thread = file._thread
        if thread is not None:
            begin = time.perf_counter()
            thread.join()
            seconds.append(time.perf_counter() - begin)
            ends.append(number)
        if len(ends) == 2:
            break
    file.close()
    every = ends[1] - ends[0]
    return {
        "MiB": MIB,
        "thinned in s": f"{max(seconds):.2f}",
        "every steps": every,
        "thinning us a step": f"{max(seconds) / every * 1e6:.0f}",
        "seconds of thinning": max(seconds) / every,
    }


def main() -> None:
    if hf is None:
        sys.exit("transformers is missing: nothing is measured")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        progress("a narrow GPT-2")
        added, path = added_seconds(folder)
        record = read_record(path)
        size = statistics.median(map(len, path.read_bytes().splitlines()[2:]))
        progress("thinning")
        thinned = thinning(path, folder)
    progress("GPT-2 small")
    step = step_seconds()
    whole = added + thinned.pop("seconds of thinning")
    row = {
        "model": "GPT-2 small",
        "entries": len(record.entries),
        "record adds us": f"{added * 1e6:.0f}",
        "step ms": f"{step * 1e3:.0f}",
        "share": f"{added / step:.3%}",
        "bytes a step": round(size),
        **thinned,
        "share with it": f"{whole / step:.3%}",
    }
    write("record", "The flight record", NOTES, [row], COLUMNS)


if __name__ == "__main__":
    restart_with(KEEPS_MEMORY)
    main()
