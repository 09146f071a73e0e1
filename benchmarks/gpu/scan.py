"""How close is a scan on the GPU to a plain read, and how far from the alternatives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from common import progress, ratio
from timing import (
    DEVICE,
    DRY,
    Times,
    in_turn,
    load_plain_read,
    quartiles,
    race,
    save,
    synchronize,
    wall_time,
)

import overflow_fast

KIB, MIB, GIB = 2**10, 2**20, 2**30
COLD_BYTES = 512 * MIB  # several times the L2 of any GPU there is
SIZES = [4 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB, 4 * GIB]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]
OTHERS = [torch.float16, torch.float64, torch.float8_e5m2, torch.int64, torch.uint8]
OTHERS += [torch.complex64, torch.float8_e4m3fnuz]
if DRY:
    SIZES, COLD_BYTES, GIB, MIB = [4 * KIB, 64 * KIB], 64 * KIB, 64 * KIB, 16 * KIB
op = torch.ops.overflow_fast.scan.default


def filled(dtype: torch.dtype, num_bytes: int) -> torch.Tensor:
    """A tensor of ordinary numbers."""
    numel = num_bytes // dtype.itemsize
    base = (torch.rand(min(numel, 1 << 16), device=DEVICE) * 100).add(1)
    if dtype.is_complex:
        base = torch.complex(base, base.flip(0))
    repeats = -(-numel // base.numel())
    return base.to(dtype).repeat(repeats)[:numel].contiguous()


def new_slots(count: int = 1) -> torch.Tensor:
    slots = torch.zeros(count, 4, dtype=torch.long, device=DEVICE)
    slots[:, 0] = -1
    return slots


def calls_for(num_bytes: int) -> int:
    """Calls that take about 5 ms, as the bandwidth of an H200 lets expect."""
    return max(2, min(200, int(5e-3 / (num_bytes / 4e12 + 3e-6))))


def row_of(kind: str, num_bytes: int, times: Times, **more: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": kind, "bytes": num_bytes, **more}
    for name, seconds in times.items():
        row[name] = {
            "seconds": quartiles(seconds),
            "gb_per_s": num_bytes / quartiles(seconds)[1] / 1e9,
            "over_scan": ratio(times, name, "scan") if "scan" in times else None,
        }
    return row


def ceilings(read: Callable[[torch.Tensor], object]) -> dict[str, Any]:
    """A plain read, and a copy (which reads and writes), of several GiB."""
    source = filled(torch.float32, 4 * GIB)
    target = torch.empty_like(source)
    competitors = {
        "plain read": lambda: read(source),
        "copy": lambda: target.copy_(source),
    }
    times = race(competitors, 3)
    return row_of("ceiling", source.nbytes, times)


def bandwidth(
    read: Callable[[torch.Tensor], object], dtype: torch.dtype, size: int, is_cold: bool
) -> dict[str, Any]:
    count = max(1, COLD_BYTES // size) if is_cold else 1
    tensors = filled(dtype, count * size).split(size // dtype.itemsize)
    # Each reads what the other has not just brought into L2.
    ours, theirs = (tensors[::2], tensors[1::2]) if count > 1 else (tensors, tensors)
    slots = new_slots()
    competitors = {
        "scan": in_turn(lambda t: op(slots, 0, [t]), ours),
        "plain read": in_turn(read, theirs),
    }
    times = race(competitors, calls_for(size))
    where = "cold" if is_cold else "warm"
    return row_of("bandwidth", size, times, dtype=str(dtype)[6:], l2=where)


def unaligned(read: Callable[[torch.Tensor], object]) -> list[dict[str, Any]]:
    """Tensors that do not start at a vector, rows with gaps, elements with gaps."""
    base, slots = filled(torch.bfloat16, GIB), new_slots()
    side = base[: base.numel() // 6144 * 6144].view(-1, 6144)
    views = {
        "offset by one element": base[1:],
        "a third of each row": side[:, 2048:4096],
        "every other element": base[::2],
    }
    rows = []
    for name, view in views.items():
        competitors = {
            "scan": lambda v=view: op(slots, 0, [v]),
            "plain read": lambda v=view: read(base[: v.numel()]),
        }
        times = race(competitors, 5)
        num_bytes = view.numel() * view.itemsize
        rows.append(row_of("layout", num_bytes, times, layout=name))
    return rows


def nonfinite() -> list[dict[str, Any]]:
    """What a second look costs: one nan, and nothing but nans."""
    rows = []
    for name in ("clean", "one nan", "all nan"):
        tensor, slots = filled(torch.bfloat16, GIB), new_slots()
        if name == "one nan":
            tensor[tensor.numel() // 2] = torch.nan
        elif name == "all nan":
            tensor.fill_(torch.nan)
        times = race({"scan": lambda t=tensor, s=slots: op(s, 0, [t])}, 5)
        rows.append(row_of("nonfinite", tensor.nbytes, times, values=name))
    return rows


def lists() -> list[dict[str, Any]]:
    """1000 tensors of 4 KiB in one call, beside one launch of one tensor."""
    rows = []
    for count in (1, 4, 80, 1000):
        tensors = [filled(torch.float32, 4 * KIB) for _ in range(count)]
        slots = new_slots(count)
        competitors = {"scan": lambda t=tensors, s=slots: op(s, 0, t)}
        if not DRY:
            competitors["foreach_norm"] = lambda t=tensors: torch._foreach_norm(t)
        times = race(competitors, 20)
        rows.append(row_of("list", 4 * KIB * count, times, tensors=count))
    return rows


def original(x: torch.Tensor) -> None:
    """The original's work for a tensor, without waiting for its results."""
    torch.isnan(x).any()
    torch.isinf(x).any()
    x.abs().min()
    x.abs().max()


def original_with_syncs(x: torch.Tensor) -> None:
    torch.isnan(x).any().item()
    torch.isinf(x).any().item()
    x.abs().min().item()
    x.abs().max().item()


def alternatives() -> list[dict[str, Any]]:
    rows = []
    scale, found = (torch.ones(1, device=DEVICE) for _ in range(2))
    for dtype in (torch.float32, torch.bfloat16):
        for size in (MIB, 64 * MIB, GIB):
            x, slots = filled(dtype, size), new_slots()
            competitors: dict[str, Callable[[], object]] = {
                "scan": lambda x=x, s=slots: op(s, 0, [x]),
                "original": lambda x=x: original(x),
                "aminmax": lambda x=x: torch.aminmax(x),
                "foreach_norm": lambda x=x: torch._foreach_norm([x], torch.inf),
            }
            if not DRY:
                unscale = torch._amp_foreach_non_finite_check_and_unscale_
                competitors["unscale"] = lambda x=x, u=unscale: u([x], found, scale)
            times = race(competitors, max(2, calls_for(size) // 4))
            rows.append(row_of("alternatives", size, times, dtype=str(dtype)[6:]))
            waits: dict[str, Callable[[], object]] = {
                "scan": lambda x=x, s=slots: (op(s, 0, [x]), s.cpu()),
                "original": lambda x=x: original_with_syncs(x),
            }
            times = race(waits, max(2, calls_for(size) // 4), wall_time)
            rows.append(row_of("with syncs", size, times, dtype=str(dtype)[6:]))
    return rows


def blocks_sweep() -> list[dict[str, Any]]:
    """Other numbers of blocks on each multiprocessor, each in a process of its own."""
    rows = []
    for blocks in (1, 2, 4, 8):
        environment = os.environ | {"OVERFLOW_FAST_CUDA_BLOCKS": str(blocks)}
        command = [sys.executable, __file__, "--only-blocks", *sys.argv[1:]]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            rows.append(
                {"kind": "blocks", "blocks": blocks, "error": done.stderr[-400:]}
            )
            continue
        for line in done.stdout.splitlines():
            size, seconds = line.split()
            rows.append({"kind": "blocks", "blocks": blocks, "bytes": int(size)})
            rows[-1]["gb_per_s"] = int(size) / float(seconds) / 1e9
    return rows


def only_blocks() -> None:
    for size in (16 * MIB, GIB):
        slots, count = new_slots(), max(1, COLD_BYTES // size)
        tensors = filled(torch.bfloat16, count * size).split(size // 2)
        scan = in_turn(lambda t, s=slots: op(s, 0, [t]), tensors)
        print(size, quartiles(race({"scan": scan}, calls_for(size))["scan"])[1])


def check() -> None:
    """Correctness before speed."""
    for dtype in (*DTYPES, *OTHERS):
        tensor, slots = filled(dtype, MIB), new_slots()
        op(slots, 0, [tensor])
        synchronize()
        wide = tensor.to(torch.complex128 if dtype.is_complex else torch.float64).abs()
        low, high = wide.min().to(torch.float64), wide.max().to(torch.float64)
        stat = overflow_fast.scan([tensor])[0]
        assert stat.is_finite and abs(stat.abs_max - high.item()) <= 1e-5 * high.item()
        assert abs(stat.abs_min - low.item()) <= 1e-5 * low.item()
        assert slots[0, 0] <= slots[0, 1] and not slots[0, 2:].any()


def main() -> None:
    check()
    read = load_plain_read()
    rows = [ceilings(read)]
    for dtype in DTYPES:
        for size in SIZES:
            progress(f"{dtype}, {size} bytes")
            rows.append(bandwidth(read, dtype, size, is_cold=True))
            if size <= 16 * MIB:
                rows.append(bandwidth(read, dtype, size, is_cold=False))
    rows += [bandwidth(read, dtype, 256 * MIB, is_cold=True) for dtype in OTHERS]
    if not DRY and torch.cuda.mem_get_info()[0] > 24 * GIB:
        rows.append(bandwidth(read, torch.bfloat16, 8 * GIB, is_cold=True))
    for measure in (lists, nonfinite, alternatives, blocks_sweep):
        progress(measure.__name__)
        rows += measure()
    rows += unaligned(read)
    save("scan", rows)


if __name__ == "__main__":
    only_blocks() if "--only-blocks" in sys.argv else main()
