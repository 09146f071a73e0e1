"""What the GPU benchmarks share: the device, timing by events, the floor, JSON.

`--dry` runs everything on the CPU with tiny sizes, to see that it runs; its figures
mean nothing.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import overflow_fast

HERE = Path(__file__).parent
BUILD = HERE.parent.parent / "build" / "benchmarks"
DRY = "--dry" in sys.argv
DEVICE = torch.device("cpu" if DRY else "cuda")
ROUNDS = 2 if DRY else 9
SLEEP_CYCLES_PER_CALL = 40_000  # 20 us at 2 GHz: longer than the host needs to launch
Times = dict[str, list[float]]


def synchronize() -> None:
    if not DRY:
        torch.cuda.synchronize()


def gpu_time(function: Callable[[], object], calls: int) -> float:
    """GPU seconds per call. The GPU sleeps until the host has queued all of them."""
    if DRY:
        return host_time(function, calls)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES_PER_CALL * calls)
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def host_time(function: Callable[[], object], calls: int) -> float:
    """Host seconds per call, without waiting for the GPU."""
    synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    seconds = (time.perf_counter() - begin) / calls
    synchronize()
    return seconds


def wall_time(function: Callable[[], object], calls: int) -> float:
    """Seconds per call until the GPU is done."""
    synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    synchronize()
    return (time.perf_counter() - begin) / calls


def race(
    competitors: dict[str, Callable[[], object]],
    calls: int,
    timer: Callable[[Callable[[], object], int], float] = gpu_time,
    rounds: int = ROUNDS,
) -> Times:
    """Times functions in turn, in a new order each round; seconds per call."""
    for function in competitors.values():
        function()
        function()
    times: Times = {name: [] for name in competitors}
    order = list(competitors)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            times[name].append(timer(competitors[name], 1 if DRY else calls))
    return times


def quartiles(seconds: list[float]) -> list[float]:
    return statistics.quantiles(seconds, n=4)


def in_turn(
    function: Callable[[torch.Tensor], object], tensors: Iterable[torch.Tensor]
) -> Callable[[], object]:
    """Calls the function with one tensor after the other, so that L2 holds none."""
    turn = itertools.cycle(tensors)
    return lambda: function(next(turn))


def load_plain_read() -> Callable[[torch.Tensor], object]:
    """Compiles the floor; reads a tensor's whole 16-byte vectors."""
    if DRY:
        return lambda tensor: tensor.view(torch.uint8).sum()
    BUILD.mkdir(parents=True, exist_ok=True)
    library = BUILD / "plain_read.so"
    major, minor = torch.cuda.get_device_capability()
    flags = ["-O3", f"-arch=sm_{major}{minor}", "-Xcompiler", "-fPIC", "-shared"]
    source = HERE / "plain_read.cu"
    subprocess.run(["nvcc", *flags, str(source), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).plain_read
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, size, pointer, ctypes.c_int, pointer]
    out = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    blocks = 4 * torch.cuda.get_device_properties(0).multi_processor_count

    def read(tensor: torch.Tensor) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        arguments = tensor.data_ptr(), tensor.nbytes, out.data_ptr(), blocks, stream
        if function(*arguments):
            raise RuntimeError("the plain read could not be launched")

    check = torch.zeros(1 << 20, dtype=torch.int32, device=DEVICE)
    check[-1] = 5
    read(check)
    assert out.item() == 5
    return read


def device_facts() -> dict[str, Any]:
    """The GPU, the software and the commit that a result belongs to."""
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "overflow_fast": overflow_fast.__version__,
        "commit": os.environ.get("COMMIT", "unknown"),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    if DRY:
        return facts
    properties = torch.cuda.get_device_properties(0)
    facts["gpu"] = properties.name
    facts["multiprocessors"] = properties.multi_processor_count
    facts["memory_gib"] = round(properties.total_memory / 2**30)
    fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", "0"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        facts |= dict(zip(fields.split(","), found.strip().split(", "), strict=True))
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        facts["nvidia-smi"] = str(error)
    return facts


def save(name: str, rows: list[dict[str, Any]]) -> None:
    """Writes a part of the result for report.py."""
    folder = Path(os.environ.get("GPU_RESULTS", BUILD / "gpu"))
    folder.mkdir(parents=True, exist_ok=True)
    part = {"device": device_facts(), "rows": rows}
    (folder / f"{name}.json").write_text(json.dumps(part, indent=1) + "\n")
