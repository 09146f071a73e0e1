"""Other constants for the scan kernel, and what the size of its parameters costs.

Compiles the kernel again with each set of constants; the package is left as it is.
"""

from __future__ import annotations

import ctypes
import math
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from common import Results, progress, size_text
from facts import SKIPPED, find_nvcc
from floor import nvcc_library
from timing import (
    DEVICE,
    ON_GPU,
    QUICK,
    device_time,
    free_bytes,
    host_time,
    in_turn,
    race,
    summary,
)

# Threads of a block, 16-byte loads of a thread at once, blocks of a multiprocessor, and
# whether L2 drops first what was read; the first are today's. Others must be better by
# a margin in the worst of their cases. L2 matters to what runs next: the fastest scan
# may make the step slower, so that a hint also has to win where a step is measured.
VARIANTS = [
    (256, 4, 4, 0),
    (256, 4, 4, 1),
    (256, 2, 4, 0),
    (256, 8, 2, 0),
    (256, 4, 2, 0),
    (512, 4, 2, 0),
    (128, 4, 8, 0),
]
MARGIN = 0.03
# The numbers of csrc/scan/dtype.h.
BFLOAT16, FLOAT8_E4M3FN = 3, 4
DTYPES = ((BFLOAT16, "bfloat16"), (FLOAT8_E4M3FN, "float8_e4m3fn"))
MIB = 2**20
COLUMNS = ["threads, loads, blocks, evicts", "dtype", "size", "GB/s"]
COLUMNS += ["tensors in a list", "32 KiB of parameters", "host us", "GPU us"]
NOTES = (
    f"Rule for the constants: today's stay unless others are {MARGIN:.0%} faster in "
    "the geometric mean over all cases, and slower in none by as much."
)


class Variant:
    """The functions of one compiled variant, on the current stream."""

    def __init__(self, nvcc: str, constants: tuple[int, int, int, int]) -> None:
        names = ("THREADS", "UNROLL", "BLOCKS", "EVICT_FIRST")
        pairs = zip(names, constants, strict=True)
        flags = [f"-DOF_CUDA_{name}={value}" for name, value in pairs]
        name = "variant-" + "-".join(map(str, constants))
        self.library = nvcc_library(nvcc, "constants.cu", name, *flags)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        flags_of_scan = [ctypes.c_int, ctypes.c_int, pointer]
        self.library.scan_variant.argtypes = [
            *(pointer, number, ctypes.c_int, number, pointer),
            *flags_of_scan,
        ]
        properties = torch.cuda.get_device_properties(0)
        self.multiprocessors = properties.multi_processor_count
        self.slots = torch.tensor([[-1, 0, 0, 0]] * 1024, device=DEVICE)

    def scan(
        self, data: torch.Tensor, dtype: int, count: int = 1, large: int = 1
    ) -> None:
        numel = data.nbytes // (2 if dtype == BFLOAT16 else 1) // count
        stream = torch.cuda.current_stream().cuda_stream
        where = data.data_ptr(), numel, dtype, count, self.slots.data_ptr()
        if self.library.scan_variant(*where, self.multiprocessors, large, stream):
            raise RuntimeError("a variant could not be launched")


def constants(variants: dict[str, Variant]) -> Iterator[dict[str, Any]]:
    most = min(2**30, free_bytes())
    memory = torch.randint(0, 60, (most,), dtype=torch.uint8, device=DEVICE)
    for dtype, name in DTYPES:
        for size in (MIB, 16 * MIB, most):
            parts = memory.split(size)
            competitors = {
                key: in_turn(lambda t, v=variant, d=dtype: v.scan(t, d), parts)
                for key, variant in variants.items()
            }
            for key, seconds in race(competitors).items():
                row = {COLUMNS[0]: key, "dtype": name, "size": size_text(size)}
                speed = size / summary(seconds)["median"] / 1e9
                yield row | {"GB/s": f"{speed:.4g}", "gb_per_s": speed}


def lists(variant: Variant) -> Iterator[dict[str, Any]]:
    """What the size of the kernel's parameters costs the host and the GPU."""
    memory = torch.randint(0, 60, (4 * MIB,), dtype=torch.uint8, device=DEVICE)
    for count, large in ((1, 0), (4, 0), (5, 0), (80, 0), (89, 1), (980, 0), (980, 1)):
        part = memory[: count * 4096]
        run = {"scan": lambda p=part, c=count, n=large: variant.scan(p, BFLOAT16, c, n)}
        row = {COLUMNS[4]: count, COLUMNS[5]: bool(large)}
        host, gpu = (race(run, timer=t)["scan"] for t in (host_time, device_time))
        row["host us"] = f"{summary(host)['median'] * 1e6:.2f}"
        yield row | {"GPU us": f"{summary(gpu)['median'] * 1e6:.2f}"}


def verdict(rows: list[dict[str, Any]]) -> str:
    """Which constants win by the rule."""
    speeds: dict[str, list[float]] = {}
    for row in rows:
        speeds.setdefault(row[COLUMNS[0]], []).append(row["gb_per_s"])
    today = speeds[str(VARIANTS[0])]
    best, gain = str(VARIANTS[0]), 1 + MARGIN
    for key, found in speeds.items():
        ratios = [a / b for a, b in zip(found, today, strict=True)]
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        if min(ratios) > 1 - MARGIN and mean >= gain:
            best, gain = key, mean
    word = "stay" if best == str(VARIANTS[0]) else f"win by {gain - 1:.1%}"
    return f"{COLUMNS[0]}: {best} {word}"


def main() -> None:
    nvcc = find_nvcc()
    if not ON_GPU or nvcc is None:
        print("skipped: " + ("nvcc was not found" if ON_GPU else "needs a GPU"))
        sys.exit(SKIPPED)
    results = Results("constants", "Constants of the scan kernel", NOTES, COLUMNS)
    chosen = VARIANTS[: 2 if QUICK else None]
    progress("compiling")
    with ThreadPoolExecutor() as pool:
        made = pool.map(lambda each: Variant(nvcc, each), chosen)
        variants = dict(zip(map(str, chosen), made, strict=True))
    progress("measuring")
    for row in constants(variants):
        results.add(row)
    results.headline(verdict(results.rows))
    for row in lists(variants[str(VARIANTS[0])]):
        results.add(row)
    results.finish()


if __name__ == "__main__":
    main()
