"""What the benchmarks share: the machine, paired timing, results as JSON and tables."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.utils.cpp_extension
from torch import nn
from transformers.debug_utils import DebugUnderflowOverflow as Original

import overflow_fast
from overflow_fast import _C

HERE = Path(__file__).parent
QUICK = "--quick" in sys.argv
FLAGS = ["-std=c++20", "-O3", "-march=native", "-Wno-psabi"]


@functools.cache
def plain_read() -> Callable[[torch.Tensor], int]:
    """Compiles and returns the function that reads every byte of a tensor once."""
    # The compiler driver finds ninja beside the interpreter.
    folder = os.path.dirname(sys.executable)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    build = HERE.parent / "build" / "benchmarks"
    build.mkdir(parents=True, exist_ok=True)
    module = torch.utils.cpp_extension.load(
        "overflow_fast_plain_read",
        [str(HERE / "plain_read.cpp")],
        extra_cflags=FLAGS,
        build_directory=str(build),
    )
    check = torch.zeros(1 << 20, dtype=torch.uint8)
    check[-1] = 5
    assert module.plain_read(check) == 5
    return module.plain_read


def cache_size(level: int) -> str:
    """The size of the first core's cache of a level, as the kernel tells it."""
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        if (index / "level").read_text().strip() == str(level):
            return (index / "size").read_text().strip()
    return "unknown"


def machine() -> dict[str, Any]:
    """The processor, the software and the commit that a result belongs to."""
    git = functools.partial(subprocess.run, cwd=HERE, capture_output=True, text=True)
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    sources = ["../csrc", "../overflow_fast", ".", ":!results"]
    status = git(["git", "status", "--porcelain", "-uno", "--", *sources])
    return {
        "cpu": cpu.group(1) if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30),
        "l2": cache_size(2),
        "l3": cache_size(3),
        "isa": _C.isa(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "overflow_fast": overflow_fast.__version__,
        "commit": git(["git", "rev-parse", "--short", "HEAD"]).stdout.strip(),
        "is_clean": status.stdout == "",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def slug() -> str:
    """A short name for the machine's kind, for file names."""
    name = machine()["cpu"].lower().replace("(r)", "")
    return re.sub(r"[^a-z0-9]+", "-", f"{name} {os.cpu_count()} cores").strip("-")


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Runs torch on this many threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def silence() -> Iterator[io.StringIO]:
    """Catches what is printed meanwhile."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        yield out


@contextlib.contextmanager
def original(model: nn.Module) -> Iterator[None]:
    """Watches with the original, whose hooks it cannot take off itself."""
    Original(model)
    try:
        with silence():
            yield
    finally:
        for module in model.modules():
            module._forward_hooks.clear()


def _once(function: Callable[[], object], calls: int) -> float:
    gc.collect()
    gc.disable()
    try:
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - begin) / calls
    finally:
        gc.enable()


def _calls_in(function: Callable[[], object], seconds: float) -> int:
    """How often a warm function is called in this time, at least once."""
    function()
    calls = 1
    while (each := _once(function, calls)) * calls < seconds / 4:
        calls *= 4
    return max(1, int(seconds / each))


def race(
    competitors: dict[str, Callable[[], object]],
    rounds: int = 9,
    min_seconds: float = 2e-3,
    around: dict[str, Callable[[], AbstractContextManager[object]]] | None = None,
) -> dict[str, list[float]]:
    """Times functions in turn, in a new order each round.

    A function that is shorter than `min_seconds` is called as often as fills that
    time, so a small buffer is warm in cache. Entering and leaving what `around` has
    for a name is not timed.

    Returns:
        For each name its seconds per call, one figure a round.
    """
    rounds = 3 if QUICK else rounds
    around = around or {}
    calls = {}
    for name, function in competitors.items():
        with around.get(name, contextlib.nullcontext)():
            calls[name] = _calls_in(function, min_seconds)
    times: dict[str, list[float]] = {name: [] for name in competitors}
    order = list(competitors)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            with around.get(name, contextlib.nullcontext)():
                times[name].append(_once(competitors[name], calls[name]))
    return times


def ratio(times: dict[str, list[float]], name: str, to: str) -> float:
    """The median over the rounds of one competitor's time over another's."""
    pairs = zip(times[name], times[to], strict=True)
    return statistics.median(a / b for a, b in pairs)


def summary(seconds: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return {"median": middle, "lower_quartile": low, "upper_quartile": high}


def size_text(num_bytes: float) -> str:
    """A number of bytes in its natural unit."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"


def progress(text: str) -> None:
    """Says on stderr what is being measured."""
    print(f"  {text}", file=sys.stderr, flush=True)


def write(
    name: str, title: str, notes: str, rows: list[dict[str, Any]], columns: list[str]
) -> None:
    """Writes a result's JSON and its table, and prints the table."""
    where = machine()
    lines = [f"# {title}", "", notes, ""]
    lines.append(" | ".join(["", *columns, ""]).strip())
    lines.append("|" + "---|" * len(columns))
    for row in rows:
        cells = [str(row.get(column, "")) for column in columns]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", ", ".join(f"{key} {value}" for key, value in where.items()), ""]
    text = "\n".join(lines)
    print(text)
    if QUICK:
        return
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    stem = f"{name}-{slug()}"
    (folder / f"{stem}.md").write_text(text)
    result = {"machine": where, "title": title, "notes": notes, "rows": rows}
    (folder / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
