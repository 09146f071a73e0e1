"""How slow torch operations are where no kernel is, and what they allocate."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from common import allocations, progress, size_text, threads, write
from timing import QUICK, race, ratio, summary

COLUMNS = [
    *("tensor", "time / kernel", "time / abs().aminmax()", "temporaries / tensor"),
]
NOTES = (
    "The operator `scan_composite`, which serves devices without a kernel, on one "
    "thread of the CPU beside the CPU's kernel and the shortest line of torch that "
    "gives both extremes. The last column is the most that torch's allocator has given "
    "out at once; goal: 1 at most (of small tensors 64 KiB), and 64 MiB at most."
)
DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.complex64, torch.int64, torch.uint8),
]
SIZES = [1 << 20] if QUICK else [1 << 14, 1 << 24, 1 << 28]


def peak(function: Callable[[], object]) -> int:
    """The most bytes that torch's CPU allocator has given out at once meanwhile."""
    return max(itertools.accumulate(allocations(function), initial=0))


def row(dtype: torch.dtype, size: int) -> dict[str, Any]:
    ops = torch.ops.overflow_fast
    part = {torch.complex64: torch.float32}.get(dtype, dtype)
    tensor = torch.randint(0, 60, (size // part.itemsize,)).to(part).view(dtype)
    slots = torch.tensor([[-1, 0, 0, 0]] * 2)
    ops.scan(slots, 0, [tensor])
    ops.scan_composite(slots, 1, [tensor])
    assert torch.equal(slots[0], slots[1])
    competitors = {
        "fallback": lambda: ops.scan_composite(slots, 0, [tensor]),
        "kernel": lambda: ops.scan(slots, 0, [tensor]),
    }
    if dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        competitors["aminmax"] = lambda: tensor.abs().aminmax()
    times = race(competitors, rounds=5)
    found = {
        "tensor": f"{str(dtype)[6:]}, {size_text(size)}",
        COLUMNS[1]: f"{ratio(times, 'fallback', 'kernel'):.1f}",
        COLUMNS[3]: f"{peak(competitors['fallback']) / size:.2f}",
        "seconds": summary(times["fallback"]),
    }
    if "aminmax" in times:
        found[COLUMNS[2]] = f"{ratio(times, 'fallback', 'aminmax'):.1f}"
    return found


def main() -> None:
    rows = []
    for size in SIZES:
        for dtype in DTYPES:
            progress(f"{dtype}, {size}")
            with threads(1):
                rows.append(row(dtype, size))
    write("fallback", "Scan by torch operations", NOTES, rows, COLUMNS)


if __name__ == "__main__":
    main()
