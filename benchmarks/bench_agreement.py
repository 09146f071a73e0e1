"""What it costs ranks to decide together: measured on 2 and 4, computed for more."""

from __future__ import annotations

import functools
import math
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing
from common import progress, write
from timing import QUICK
from torch import nn

from overflow_fast import OverflowGuard
from overflow_fast.guard.ranks.agreement import Agreement
from overflow_fast.guard.verdict.verdict import Verdict

CALLS = 50 if QUICK else 3000
STEPS = 5 if QUICK else 60
COLUMNS = [
    "ranks",
    "backend",
    "how",
    "all-reduce of 64 B, us",
    "agreement, us",
    "of it our own, us",
    "step alone, ms",
    "together adds, ms",
    "adds",
]
NOTES = (
    "Measured: processes of one machine, a thread each; more of them than cores wait "
    "for each other's turns. `agreement` is all that a judged step does to decide "
    "together while nothing is wrong, `our own` what of it is no collective: medians "
    "of calls, of the slowest rank. The step is a DDP step under a guard that decides "
    "alone and together, in turns: medians, and that of the paired differences. "
    "Computed: see AGREEMENT.md."
)
# NCCL's own model of a tree all-reduce with its LL protocol: src/graph/tuning.cc.
NCCL_BASE, NCCL_NVLINK, NCCL_NETWORK = 4.4, 0.52 * 1.8, 5.0  # us
GPUS_OF_A_NODE = 8


def nccl_tree(ranks: int) -> float:
    """How long NCCL says that its smallest all-reduce takes, in us."""
    nodes = max(1, ranks // GPUS_OF_A_NODE)
    within = (min(ranks, GPUS_OF_A_NODE) - 1) * NCCL_NVLINK
    return NCCL_BASE + 2 * (within + int(math.log2(nodes)) * NCCL_NETWORK)


def backend(world: int) -> str:
    """NCCL where each rank has a GPU, else gloo."""
    return "nccl" if torch.cuda.device_count() >= world else "gloo"


def median_us(function: Callable[[], object], calls: int) -> float:
    times = []
    for i in range(calls + calls // 10):
        begin = time.perf_counter()
        function()
        if i >= calls // 10:
            times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def steps_of(device: torch.device) -> tuple[list[float], list[float]]:
    """The times of DDP steps under guards that decide alone and together, in pairs."""
    times: tuple[list[float], list[float]] = ([], [])
    runs = []
    for group in (False, None):
        torch.manual_seed(0)
        layers = [nn.Linear(1024, 1024) for _ in range(6)]
        ids = None if device.type == "cpu" else [device.index]
        model = nn.parallel.DistributedDataParallel(
            nn.Sequential(*layers).to(device), device_ids=ids
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        guard = OverflowGuard(model, optimizer, process_group=group)
        runs.append((model, optimizer, guard))
    x = torch.randn(128, 1024, device=device)
    for i in range(2 * STEPS):
        for place in (0, 1) if i % 2 else (1, 0):
            model, optimizer, _ = runs[place]
            begin = time.perf_counter()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if i >= STEPS:
                times[place].append(time.perf_counter() - begin)
    return times


def measure(rank: int, world: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    url = f"tcp://127.0.0.1:{port}"
    name = backend(world)
    dist.init_process_group(name, init_method=url, rank=rank, world_size=world)
    device = torch.device("cpu")
    if name == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)

    def all_reduce() -> None:
        # As in a step, the backend's thread has gone to sleep meanwhile.
        words = torch.zeros(8, dtype=torch.int64)
        words[:3] = torch.tensor([0, 3, -3])
        here = words.to(device)
        dist.all_reduce(here, dist.ReduceOp.MAX)
        here.cpu()

    bare = median_us(all_reduce, CALLS)
    agreement = Agreement(dist.group.WORLD, [], True)
    assert agreement.is_needed
    clean = Verdict()
    agree = functools.partial(agreement.agree, 3, clean, 0, lambda: None)
    whole = median_us(agree, CALLS)
    with mock.patch.object(dist, "all_reduce"):
        own = median_us(agree, CALLS)
    alone, together = steps_of(device)
    added = statistics.median(b - a for a, b in zip(alone, together, strict=True))
    found = (bare, whole, own, statistics.median(alone), added)
    torch.save(found, Path(folder) / str(rank))
    dist.barrier()
    dist.destroy_process_group()


def measured(world: int) -> tuple[dict[str, Any], float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (world, port, folder), nprocs=world)
        found = [torch.load(Path(folder) / str(rank)) for rank in range(world)]
    bare, whole, own, alone, added = map(max, zip(*found, strict=True))
    row = {
        "ranks": world,
        "backend": backend(world),
        "how": "measured",
        "all-reduce of 64 B, us": round(bare, 1),
        "agreement, us": round(whole, 1),
        "of it our own, us": round(own, 1),
        "step alone, ms": round(alone * 1e3, 1),
        "together adds, ms": round(added * 1e3, 2),
        "adds": f"{added / alone:.1%}",
    }
    return row, own


def main() -> None:
    rows = []
    own = 0.0
    for world in (2, 4):
        progress(f"{world} ranks")
        row, own = measured(world)
        rows.append(row)
    for ranks in (8, 64, 1_000, 10_000):
        time_us = nccl_tree(ranks)
        rows.append(
            {
                "ranks": ranks,
                "backend": "nccl",
                "how": "computed",
                "all-reduce of 64 B, us": round(time_us, 1),
                "agreement, us": round(time_us + own, 1),
                "of it our own, us": round(own, 1),
            }
        )
    write("agreement", "Deciding together", NOTES, rows, COLUMNS)


if __name__ == "__main__":
    main()
