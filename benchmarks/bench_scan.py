"""One tensor: the scan against a plain read of its bytes and the alternatives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import (
    NO_ORIGINAL,
    Original,
    Results,
    progress,
    require_kernels,
    silence,
    size_text,
    threads,
)
from floor import floor_kind, plain_read
from timing import (
    DEVICE,
    ON_GPU,
    QUICK,
    free_bytes,
    in_turn,
    race,
    ratio,
    summary,
    wall_time,
)

from overflow_fast import _C, scan

if Original is not None:
    from transformers.debug_utils import detect_overflow, get_abs_min_max

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex64,
    torch.complex128,
    torch.complex32,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
FULL = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
KIB, MIB, GIB = 2**10, 2**20, 2**30
SIZES = [64, KIB, 16 * KIB, 256 * KIB, 512 * KIB, MIB, 4 * MIB, 32 * MIB, 64 * MIB]
GPU_SIZES = [4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB, 8 * GIB]
COLD_BYTES = 512 * MIB  # several times the L2 of any GPU there is
WARM_LIMIT = 16 * MIB
COLUMNS = [
    "dtype",
    "size",
    "threads",
    "cache",
    "scan GB/s",
    "plain read GB/s",
    "copy GB/s",
    "scan / plain read",
    "aminmax+isfinite / scan",
    "original / scan",
    "foreach_norm / scan",
    "unscale / scan",
    "original / scan, with syncs",
]
NOTES = (
    "The last two columns say how many times longer the alternatives take. Sizes "
    "up to 1 MiB are warm in the core's L2 cache; only 1 GiB is surely beyond L3. "
    "The two are called through pybind11, which takes 0.1 to 0.2 us. Goals: 0.95 of "
    "the plain read from 64 MiB on; 60 GB/s a core and 0.6 of it in L2 (256 KiB and "
    "1 MiB); 50 times the original at 16M elements (64 MiB of float32)."
)
GPU_NOTES = (
    "Times of the GPU between events, with the launches queued before. `cold`: tensors "
    "in turn, of 512 MiB together, so that L2 holds none of them. A copy reads and "
    "writes. The last columns say how many times longer the alternatives take; the "
    "original's operations without its syncs, and with them. Goals: 0.95 of the plain "
    "read from 64 MiB on, 50 times the original at 64 MiB with syncs."
)
ORIGINAL_LIMIT = 1 << 28  # bytes; above it the original only makes the run longer
op = torch.ops.overflow_fast.scan.default


def filled(dtype: torch.dtype, num_bytes: int) -> torch.Tensor:
    """A contiguous tensor of ordinary numbers."""
    numel = max(1, num_bytes // dtype.itemsize)
    if dtype is torch.complex32:  # torch has few operations for it
        half = torch.ones(numel * 2, dtype=torch.float16, device=DEVICE)
        return half.view(dtype)
    base = torch.rand(min(numel, 1 << 16)) * 2 - 1
    if dtype.is_complex:
        base = torch.complex(base, base.flip(0))
    if dtype is torch.float8_e8m0fnu:
        base = base.abs()
    repeats = -(-numel // base.numel())
    # As bytes: not every dtype can be repeated on every device.
    base = base.to(dtype).view(torch.uint8).to(DEVICE)
    return base.repeat(repeats)[: numel * dtype.itemsize].view(dtype)


def new_slots(count: int = 1) -> torch.Tensor:
    return torch.tensor([[-1, 0, 0, 0]] * count, device=DEVICE)


def scanner() -> Callable[[torch.Tensor], object]:
    """A scan of one tensor that does not wait for a GPU."""
    slots = new_slots()
    return lambda t: op(slots, 0, [t]) if ON_GPU else _C.scan_tensors([t])


def original(tensor: torch.Tensor) -> None:
    with silence():
        detect_overflow(tensor, "x")
        get_abs_min_max(tensor, "x")


def original_without_syncs(tensor: torch.Tensor) -> None:
    torch.isnan(tensor).any()
    torch.isinf(tensor).any()
    tensor.abs().min()
    tensor.abs().max()


def aminmax_and_isfinite(tensor: torch.Tensor) -> None:
    torch.aminmax(tensor)
    is_finite = torch.isfinite(tensor).all()
    if not ON_GPU:
        bool(is_finite)


def unscaler() -> Callable[[torch.Tensor], object]:
    """GradScaler's check of gradients, which writes them, too."""
    found, scale = (torch.ones(1, device=DEVICE) for _ in range(2))
    unscale = torch._amp_foreach_non_finite_check_and_unscale_
    return lambda tensor: unscale([tensor], found, scale)


ALTERNATIVES: dict[str, Callable[[torch.Tensor], object]] = {
    "aminmax+isfinite": aminmax_and_isfinite,
    "original": original_without_syncs if ON_GPU else original,
}
if ON_GPU:
    ALTERNATIVES["foreach_norm"] = lambda t: torch._foreach_norm([t], torch.inf)
    ALTERNATIVES["unscale"] = unscaler()


def is_supported(function: Any, tensor: torch.Tensor) -> bool:
    try:
        function(tensor[:2].clone())
    except (RuntimeError, NotImplementedError, NameError):
        return False
    return True


def check(tensor: torch.Tensor) -> None:
    """Correctness before speed."""
    stat = scan([tensor])[0]
    wide = tensor[: 1 << 16].cpu()
    if tensor.dtype is torch.complex32:
        wide = wide.to(torch.complex64)
    wide = wide.to(torch.complex128 if tensor.is_complex() else torch.float64).abs()
    assert abs(stat.abs_max - wide.max().item()) <= 1e-3 * stat.abs_max
    assert stat.is_finite


def measure(
    dtype: torch.dtype, num_bytes: int, is_warm: bool, has_alternatives: bool
) -> dict[str, Any]:
    count = 1 if is_warm else max(1, COLD_BYTES // num_bytes)
    tensors = filled(dtype, count * num_bytes).split(num_bytes // dtype.itemsize or 1)
    tensor = tensors[0]
    check(tensor)
    # Each reads what the other has not just brought into a cache.
    ours, theirs = (tensors[::2], tensors[1::2]) if count > 1 else (tensors, tensors)
    competitors: dict[str, Callable[[], object]] = {
        "scan": in_turn(scanner(), ours),
        "plain read": in_turn(plain_read(), theirs),
    }
    if ON_GPU and num_bytes >= 256 * MIB and 4 * num_bytes < free_bytes():
        target = torch.empty_like(tensor)
        competitors["copy"] = lambda: target.copy_(tensor)
    if has_alternatives and tensor.nbytes <= ORIGINAL_LIMIT:
        for name, function in ALTERNATIVES.items():
            if is_supported(function, tensor):
                competitors[name] = lambda f=function: f(tensor)
    times = race(competitors, max_calls=50 if ON_GPU else 2**62)
    return row_of(tensor, times) | with_syncs(tensor, has_alternatives)


def row_of(tensor: torch.Tensor, times: dict[str, list[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "size": size_text(tensor.nbytes),
        "bytes": tensor.nbytes,
        "seconds": {name: summary(seconds) for name, seconds in times.items()},
        "scan / plain read": f"{1 / ratio(times, 'scan', 'plain read'):.2f}",
    }
    for name in ("scan", "plain read", "copy"):
        if name in times:
            moved = tensor.nbytes * (2 if name == "copy" else 1)
            row[f"{name} GB/s"] = f"{moved / summary(times[name])['median'] / 1e9:.3g}"
    for name in ALTERNATIVES:
        if name in times:
            row[f"{name} / scan"] = f"{ratio(times, name, 'scan'):.3g}"
    return row


def with_syncs(tensor: torch.Tensor, is_wanted: bool) -> dict[str, Any]:
    """On a GPU: the original as it is, beside a scan whose result the host reads."""
    if not (ON_GPU and is_wanted and Original) or not is_supported(original, tensor):
        return {}
    competitors: dict[str, Callable[[], object]] = {
        "scan": lambda: _C.scan_tensors([tensor]),
        "original": lambda: original(tensor),
    }
    times = race(competitors, timer=wall_time, max_calls=20)
    return {COLUMNS[-1]: f"{ratio(times, 'original', 'scan'):.3g}"}


def cpu_rows() -> Iterator[dict[str, Any]]:
    most = torch.get_num_threads()
    for dtype in DTYPES:
        sizes = [dtype.itemsize, *SIZES] if dtype in FULL else [MIB, 64 * MIB]
        if dtype in (torch.float32, torch.bfloat16):
            sizes = [*sizes, GIB]
        for size in sizes[: 1 if QUICK else None]:
            for count in sorted({1, most}):
                progress(f"{dtype} {size_text(size)}, {count} threads")
                with threads(count):
                    yield measure(dtype, size, True, True) | {"threads": count}


def gpu_rows() -> Iterator[dict[str, Any]]:
    """What matters most first: the time may be short."""
    sizes = [size for size in GPU_SIZES if 2 * size < free_bytes()]
    for size in sorted(sizes, key=lambda size: abs(size - 256 * MIB)):
        for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn):
            progress(f"{dtype} {size_text(size)}")
            is_few = size in (MIB, 64 * MIB, 256 * MIB)
            yield measure(dtype, size, False, is_few) | {"cache": "cold"}
            if size <= WARM_LIMIT:
                yield measure(dtype, size, True, False) | {"cache": "warm"}
    for dtype in DTYPES:
        with contextlib.suppress(NotImplementedError):
            row = measure(dtype, min(256 * MIB, max(sizes)), False, False)
            yield row | {"cache": "cold"}


def main() -> None:
    require_kernels()
    title = "Scan of one contiguous tensor"
    results = Results("scan", title, GPU_NOTES if ON_GPU else NOTES, COLUMNS)
    results.lacks(floor_kind())
    if Original is None:
        ALTERNATIVES.pop("original")
        results.lacks(NO_ORIGINAL)
    for row in gpu_rows() if ON_GPU else cpu_rows():
        results.add(row)
        if row["bytes"] in (MIB, 64 * MIB, GIB) and row["dtype"] == "bfloat16":
            where = row.get("cache", f"{row.get('threads')} threads")
            results.headline(
                f"scan of {row['size']} bfloat16, {where}: {row['scan GB/s']} GB/s, "
                f"{row['scan / plain read']} of a plain read"
            )
    results.finish()


if __name__ == "__main__":
    main()
