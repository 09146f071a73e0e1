"""Common parts of benchmarks: machine, processes, the original, results, tables."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import platform
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from facts import SKIPPED, nvidia_smi, origin, table, write_json, write_whole
from timing import ON_GPU, QUICK
from torch import nn
from torch.profiler import ProfilerActivity, profile

import overflow_fast
from overflow_fast import _C

try:
    from transformers.debug_utils import DebugUnderflowOverflow as Original
except ImportError:
    Original = None

HERE = Path(__file__).parent
NO_ORIGINAL = "transformers is missing: the original is not measured"


def cache_size(level: int) -> str:
    """The size of the first core's cache of a level, as the kernel tells it."""
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        if (index / "level").read_text().strip() == str(level):
            return (index / "size").read_text().strip()
    return "unknown"


def machine() -> dict[str, Any]:
    """The processor, the GPU, the software and the commit that a result belongs to."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    facts = {
        "cpu": cpu.group(1) if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30),
        "l2": cache_size(2),
        "l3": cache_size(3),
        "isa": _C.isa(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "overflow_fast": overflow_fast.__version__,
        **origin(),
    }
    if not ON_GPU:
        return facts
    properties = torch.cuda.get_device_properties(0)
    facts |= {"gpu": properties.name, "cuda": torch.version.cuda}
    facts["multiprocessors"] = properties.multi_processor_count
    facts["gpu_gib"] = round(properties.total_memory / 2**30)
    return facts | nvidia_smi()


def slug(facts: dict[str, Any]) -> str:
    """A short name for the machine's kind, for file names."""
    if "gpu" in facts:
        name = facts["gpu"].lower()
    else:
        name = f"{facts['cpu'].lower().replace('(r)', '')} {facts['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


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


# Processes, and the memory that they need.

# Memory that is freed stays with the process: glibc's mallopt(3).
KEEPS_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(2**30),
}


def restart_with(variables: Mapping[str, str]) -> None:
    """Runs this script again with variables of the environment, unless they are set."""
    if not variables.items() <= os.environ.items():
        os.environ.update(variables)
        os.execv(sys.executable, [sys.executable, *sys.argv])


def in_fork(function: Callable[[], Any]) -> Any:
    """What a function returns in a forked process, as JSON gives it back."""
    reads, writes = os.pipe()
    if not os.fork():
        with open(writes, "w") as file:
            json.dump(function(), file)
        os._exit(0)
    os.close(writes)
    with open(reads) as file:
        found = json.load(file)
    os.wait()
    return found


def peak() -> int:
    """The bytes that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


_M_MMAP_THRESHOLD = -3  # of mallopt(3)


def peak_of(function: Callable[[], Any]) -> int:
    """The bytes that a process holds at most in which a function runs.

    What is freed goes back to the system, as far as it is larger than 128 KiB: glibc
    keeps up to twice as much, by how the sizes came.
    """

    def run() -> int:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**17)
        function()
        return peak()

    return int(in_fork(run))


def allocations(function: Callable[[], object]) -> list[int]:
    """The bytes that torch's CPU allocator gives out meanwhile; below 0, takes back."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        function()
    events = seen.profiler.kineto_results.events()
    found = [each for each in events if each.name() == "[memory]"]
    return [each.nbytes() for each in sorted(found, key=lambda each: each.start_ns())]


def bytes_of(paths: Iterable[Path]) -> int:
    """The bytes of files; folders among them count nothing."""
    return sum(path.stat().st_size for path in paths if path.is_file())


def size_text(num_bytes: float) -> str:
    """A number of bytes in its natural unit."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"


def progress(text: str) -> None:
    """Prints on stderr what is being measured."""
    print(f"  {text}", file=sys.stderr, flush=True)


def require_kernels() -> None:
    """Ends a script whose figures would not be those of the kernels."""
    if ON_GPU and not _C.has_kernels("cuda"):
        print("skipped: the extension was built without CUDA kernels")
        sys.exit(SKIPPED)


class Results:
    """Rows of a result. Within a check each row is on disk as soon as it is there.

    Args:
        name: Of the files.
        title: Of the table.
        notes: The sentences above the table.
        columns: The keys of a row that the table shows.
    """

    def __init__(self, name: str, title: str, notes: str, columns: list[str]) -> None:
        self.name, self.title, self.notes, self.columns = name, title, notes, columns
        self.machine = machine()
        self.rows: list[dict[str, Any]] = []
        self.headlines: list[str] = []
        self.lacking: list[str] = []
        self.folder = os.environ.get("CHECK_OUT")

    def add(self, *rows: dict[str, Any]) -> None:
        """Appends rows."""
        self.rows += rows
        self._save(is_complete=False)

    def headline(self, text: str) -> None:
        """Appends a line to the key figures of a check."""
        self.headlines.append(text)
        self._save(is_complete=False)

    def lacks(self, text: str | None) -> None:
        """Notes what could not be measured, and why."""
        if text and text not in self.lacking:
            self.lacking.append(text)
            progress(text)

    def finish(self) -> None:
        """Prints the table, and writes it and the JSON where results belong."""
        print(self.table())
        if self.folder:
            return self._save(is_complete=True)
        if not QUICK:
            results, stem = HERE / "results", f"{self.name}-{slug(self.machine)}"
            write_whole(results / f"{stem}.md", self.table())
            write_json(results / "raw" / f"{stem}.json", self._json(True))

    def _json(self, is_complete: bool) -> dict[str, Any]:
        names = ("machine", "title", "notes", "headlines", "lacking", "rows")
        part = {name: getattr(self, name) for name in names}
        return part | {"is_complete": is_complete}

    def _save(self, is_complete: bool) -> None:
        if self.folder:
            path = Path(self.folder) / f"{self.name}.json"
            write_json(path, self._json(is_complete))
            write_whole(path.with_suffix(".md"), self.table())

    def table(self) -> str:
        """The rows in Markdown."""
        used = [c for c in self.columns if any(c in row for row in self.rows)]
        lines = [f"# {self.title}", "", self.notes, "", *table(used, self.rows)]
        lines += ["", *self.lacking]
        lines += [
            ", ".join(f"{key} {value}" for key, value in self.machine.items()),
            "",
        ]
        return "\n".join(lines)


def write(
    name: str, title: str, notes: str, rows: list[dict[str, Any]], columns: list[str]
) -> None:
    """Writes a result of which all rows are there."""
    results = Results(name, title, notes, columns)
    results.add(*rows)
    results.finish()
