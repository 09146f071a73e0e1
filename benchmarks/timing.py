"""Paired timing on the CPU (the default) or a GPU: `--device cpu` or `cuda`."""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch


def _options() -> argparse.Namespace:
    """The options of every benchmark. A script's own words are left to it."""
    is_benchmark = Path(sys.argv[0]).name.startswith("bench_")
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=is_benchmark,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a try that writes no result")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="what is measured")
    options, _ = parser.parse_known_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"error: torch {torch.__version__} sees no GPU")
    return options


OPTIONS = _options()
QUICK = OPTIONS.quick
DEVICE = torch.device(OPTIONS.device)
ON_GPU = DEVICE.type == "cuda"
MIN_SECONDS = 5e-3 if ON_GPU else 2e-3
MAX_CALLS = 100 if ON_GPU else sys.maxsize  # a GPU's queue holds about 1000 launches
SLEEP_CYCLES_PER_CALL = 40_000  # 20 us at 2 GHz: longer than the host needs to launch
Times = dict[str, list[float]]
Timer = Callable[[Callable[[], object], int], float]


def synchronize() -> None:
    """Waits for the device."""
    if ON_GPU:
        torch.cuda.synchronize()


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def host_time(function: Callable[[], object], calls: int) -> float:
    """Host seconds per call, without waiting for the device."""
    synchronize()
    with _without_gc():
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        seconds = (time.perf_counter() - begin) / calls
    synchronize()
    return seconds


def wall_time(function: Callable[[], object], calls: int) -> float:
    """Seconds per call until the device is done."""
    synchronize()
    with _without_gc():
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize()
        return (time.perf_counter() - begin) / calls


def cpu_time(
    function: Callable[[], object],
    calls: int = 1,
    clock: Callable[[], float] = time.process_time,
) -> float:
    """CPU seconds per call of this process, or by `time.thread_time` of this thread."""
    begin = clock()
    for _ in range(calls):
        function()
    return (clock() - begin) / calls


def device_time(function: Callable[[], object], calls: int) -> float:
    """Seconds per call of the device itself: on a GPU between two events.

    The GPU sleeps until the host has queued all calls.
    """
    if not ON_GPU:
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


def _calls_in(
    function: Callable[[], object], seconds: float, timer: Timer, most: int
) -> int:
    """How often a warm function is called in this time, at least once."""
    function()
    calls = 1
    while (each := timer(function, calls)) * calls < seconds / 4 and calls < most:
        calls *= 4
    return max(1, min(most, int(seconds / each)))


def race(
    competitors: dict[str, Callable[[], object]],
    rounds: int = 9,
    min_seconds: float = MIN_SECONDS,
    around: dict[str, Callable[[], AbstractContextManager[object]]] | None = None,
    timer: Timer = device_time,
    max_calls: int = MAX_CALLS,
) -> Times:
    """Times functions in turn, in a new order each round.

    A function that is shorter than `min_seconds` is called as often as fills that
    time, so a small buffer is warm in cache. Entering and leaving what `around` has
    for a name is not timed; nor is, on a GPU, a first call within it.

    Returns:
        For each name its seconds per call, one figure a round.
    """
    rounds = 3 if QUICK else rounds
    most = 1 if QUICK else max_calls
    around = around or {}
    calls = {}
    for name, function in competitors.items():
        with around.get(name, contextlib.nullcontext)():
            calls[name] = _calls_in(function, min_seconds, timer, most)
    times: Times = {name: [] for name in competitors}
    order = list(competitors)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            with around.get(name, contextlib.nullcontext)():
                if ON_GPU and name in around:
                    competitors[name]()
                times[name].append(timer(competitors[name], calls[name]))
    return times


def ratio(times: Times, name: str, to: str) -> float:
    """The median over the rounds of one competitor's time over another's."""
    pairs = zip(times[name], times[to], strict=True)
    return statistics.median(a / b for a, b in pairs)


def summary(seconds: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return {"median": middle, "lower_quartile": low, "upper_quartile": high}


def in_turn(
    function: Callable[[torch.Tensor], object], tensors: Iterable[torch.Tensor]
) -> Callable[[], object]:
    """Calls the function with each tensor in turn, so that no cache holds them."""
    turn = itertools.cycle(tensors)
    return lambda: function(next(turn))


def free_bytes() -> int:
    """Memory that tensors may take: half of what is free, so that others fit, too."""
    if QUICK:
        return 2**26
    return torch.cuda.mem_get_info()[0] // 2 if ON_GPU else 2**33
