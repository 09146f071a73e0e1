"""One tensor: the scan against a plain read of its bytes and the alternatives."""

from __future__ import annotations

from typing import Any

import torch
from common import (
    QUICK,
    plain_read,
    progress,
    race,
    ratio,
    silence,
    size_text,
    summary,
    threads,
    write,
)
from transformers.debug_utils import detect_overflow, get_abs_min_max

from overflow_fast import _C, scan

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
FULL = {torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn}
SIZES = [64, 1 << 10, 1 << 14, 1 << 18, 1 << 19, 1 << 20, 1 << 22, 1 << 25, 1 << 26]
COLUMNS = [
    "dtype",
    "size",
    "threads",
    "scan GB/s",
    "plain read GB/s",
    "scan / plain read",
    "aminmax+isfinite / scan",
    "original / scan",
]
ORIGINAL_LIMIT = 1 << 28  # bytes; above it the original only makes the run longer
NOTES = (
    "The last two columns say how many times longer the alternatives take. Sizes "
    "up to 1 MiB are warm in the core's L2 cache; only 1 GiB is surely beyond L3. "
    "The two are called through pybind11, which takes 0.1 to 0.2 us. Goals: 0.95 of "
    "the plain read from 64 MiB on; 60 GB/s a core and 0.6 of it in L2 (256 KiB and "
    "1 MiB); 50 times the original at 16M elements (64 MiB of float32)."
)


def filled(dtype: torch.dtype, num_bytes: int) -> torch.Tensor:
    """A contiguous tensor of ordinary numbers."""
    numel = max(1, num_bytes // dtype.itemsize)
    base = torch.rand(min(numel, 1 << 16)) * 2 - 1
    if dtype is torch.complex32:  # torch has few operations for it
        return torch.ones(numel * 2, dtype=torch.float16).view(dtype)
    if dtype.is_complex:
        base = torch.complex(base, base.flip(0))
    if dtype is torch.float8_e8m0fnu:
        base = base.abs()
    repeats = -(-numel // base.numel())
    return base.to(dtype).repeat(repeats)[:numel].contiguous()


def original(tensor: torch.Tensor) -> None:
    with silence():
        detect_overflow(tensor, "x")
        get_abs_min_max(tensor, "x")


def aminmax_and_isfinite(tensor: torch.Tensor) -> None:
    torch.aminmax(tensor)
    bool(torch.isfinite(tensor).all())


def is_supported(function: Any, tensor: torch.Tensor) -> bool:
    try:
        function(tensor[:2])
    except (RuntimeError, NotImplementedError):
        return False
    return True


def check(tensor: torch.Tensor) -> None:
    """Correctness before speed."""
    stat = scan([tensor])[0]
    wide = tensor[: 1 << 16]
    if tensor.dtype is torch.complex32:
        wide = wide.to(torch.complex64)
    wide = wide.to(torch.complex128 if tensor.is_complex() else torch.float64).abs()
    assert abs(stat.abs_max - wide.max().item()) <= 1e-3 * stat.abs_max
    assert stat.is_finite


def measure(dtype: torch.dtype, num_bytes: int, num_threads: int) -> dict[str, Any]:
    tensor = filled(dtype, num_bytes)
    check(tensor)
    read = plain_read()
    competitors = {
        "scan": lambda: _C.scan_tensors([tensor]),
        "plain read": lambda: read(tensor),
    }
    if tensor.nbytes <= ORIGINAL_LIMIT:
        if is_supported(aminmax_and_isfinite, tensor):
            competitors["aminmax"] = lambda: aminmax_and_isfinite(tensor)
        if is_supported(original, tensor):
            competitors["original"] = lambda: original(tensor)
    with threads(num_threads):
        times = race(competitors)
    row: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "size": size_text(tensor.nbytes),
        "threads": num_threads,
        "seconds": {name: summary(seconds) for name, seconds in times.items()},
        "scan / plain read": f"{1 / ratio(times, 'scan', 'plain read'):.2f}",
    }
    for name in ("scan", "plain read"):
        speed = tensor.nbytes / row["seconds"][name]["median"] / 1e9
        row[f"{name} GB/s"] = f"{speed:.3g}"
    if "aminmax" in times:
        row["aminmax+isfinite / scan"] = f"{ratio(times, 'aminmax', 'scan'):.3g}"
    if "original" in times:
        row["original / scan"] = f"{ratio(times, 'original', 'scan'):.3g}"
    return row


def cases() -> list[tuple[torch.dtype, int, int]]:
    most = torch.get_num_threads()
    chosen: list[tuple[torch.dtype, int, int]] = []
    for dtype in DTYPES:
        sizes = [dtype.itemsize, *SIZES] if dtype in FULL else [1 << 20, 1 << 26]
        if dtype in (torch.float32, torch.bfloat16):
            sizes = [*sizes, 1 << 30]
        if QUICK:
            sizes = sizes[:3]
        chosen += [(dtype, size, n) for size in sizes for n in {1, most}]
    return chosen


def main() -> None:
    rows = []
    for dtype, num_bytes, num_threads in cases():
        progress(f"{dtype} {size_text(num_bytes)}, {num_threads} threads")
        rows.append(measure(dtype, num_bytes, num_threads))
    write("scan", "Scan of one contiguous tensor", NOTES, rows, COLUMNS)


if __name__ == "__main__":
    main()
