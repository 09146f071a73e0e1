"""Other constants for the scan kernel, other lists, and another way to the host.

Compiles the kernel again with each set of constants; the package is left as it is.
"""

from __future__ import annotations

import ctypes
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from common import progress
from timing import (
    BUILD,
    DEVICE,
    DRY,
    HERE,
    gpu_time,
    host_time,
    in_turn,
    quartiles,
    race,
    save,
)

# Threads of a block, 16-byte loads of a thread at once, blocks of a multiprocessor.
VARIANTS = [
    (256, 4, 4),
    (256, 2, 4),
    (256, 8, 2),
    (256, 4, 2),
    (512, 4, 2),
    (128, 4, 8),
]
BFLOAT16, FLOAT8_E4M3FN = 3, 4  # as in csrc/dtype.h
MIB, GIB = 2**20, 2**30


def compile_variant(variant: tuple[int, int, int]) -> Path:
    threads, unroll, blocks = variant
    major, minor = torch.cuda.get_device_capability()
    library = BUILD / f"variant-{threads}-{unroll}-{blocks}.so"
    flags = ["-std=c++20", "-O3", f"-arch=sm_{major}{minor}", "-Xcompiler", "-fPIC"]
    flags += [f"-DOF_CUDA_THREADS={threads}", f"-DOF_CUDA_UNROLL={unroll}"]
    flags += [f"-DOF_CUDA_BLOCKS={blocks}", "-shared", str(HERE / "variants.cu")]
    subprocess.run(["nvcc", *flags, "-o", str(library)], check=True)
    return library


class Variant:
    """The functions of one compiled variant, on the current stream."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        flags = [ctypes.c_int, ctypes.c_int, pointer]
        scan, publish = self.library.scan_variant, self.library.publish_variant
        scan.argtypes = [pointer, number, ctypes.c_int, number, pointer, *flags]
        publish.argtypes = [pointer, number, pointer, pointer, pointer]
        properties = torch.cuda.get_device_properties(0)
        self.multiprocessors = properties.multi_processor_count
        self.slots = torch.zeros(1024, 4, dtype=torch.long, device=DEVICE)
        self.slots[:, 0] = -1

    def scan(
        self, data: torch.Tensor, dtype: int, count: int = 1, large: int = 1
    ) -> None:
        numel = data.nbytes // (2 if dtype == BFLOAT16 else 1) // count
        stream = torch.cuda.current_stream().cuda_stream
        where = data.data_ptr(), numel, dtype, count, self.slots.data_ptr()
        if self.library.scan_variant(*where, self.multiprocessors, large, stream):
            raise RuntimeError("a variant could not be launched")

    def publish(self, count: int, mapped: torch.Tensor, epoch: torch.Tensor) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        where = self.slots.data_ptr(), count, mapped.data_ptr(), epoch.data_ptr()
        if self.library.publish_variant(*where, stream):
            raise RuntimeError("the slots could not be published")


def constants(variants: dict[tuple[int, int, int], Variant]) -> list[dict[str, Any]]:
    rows = []
    memory = torch.randint(0, 60, (GIB,), dtype=torch.uint8, device=DEVICE)
    for dtype, name in ((BFLOAT16, "bfloat16"), (FLOAT8_E4M3FN, "float8_e4m3fn")):
        for size, calls in ((MIB, 100), (16 * MIB, 50), (GIB, 5)):
            parts = memory.split(size)
            competitors = {
                str(key): in_turn(lambda t, v=variant, d=dtype: v.scan(t, d), parts)
                for key, variant in variants.items()
            }
            for key, seconds in race(competitors, calls).items():
                row = {
                    "kind": "constants",
                    "variant": key,
                    "dtype": name,
                    "bytes": size,
                }
                rows.append(row | {"gb_per_s": size / quartiles(seconds)[1] / 1e9})
    return rows


def lists(variant: Variant) -> list[dict[str, Any]]:
    """What the size of the kernel's parameters costs the host and the GPU."""
    rows = []
    memory = torch.randint(0, 60, (4 * MIB,), dtype=torch.uint8, device=DEVICE)
    for count, large in ((1, 0), (4, 0), (5, 0), (80, 0), (89, 1), (980, 0), (980, 1)):
        part = memory[: count * 4096]
        run = {"scan": lambda p=part, c=count, n=large: variant.scan(p, BFLOAT16, c, n)}
        row = {"kind": "parameters", "tensors": count, "large": bool(large)}
        row["host_us"] = quartiles(race(run, 50, host_time)["scan"])[1] * 1e6
        row["gpu_us"] = quartiles(race(run, 50)["scan"])[1] * 1e6
        rows.append(row)
    return rows


def ways_to_the_host(variant: Variant, count: int) -> list[dict[str, Any]]:
    """A copy and a reset, as the package does it, beside one kernel for both."""
    pinned = torch.zeros(1024, 4, dtype=torch.long, pin_memory=True)
    epoch = torch.zeros(1, dtype=torch.long, pin_memory=True)
    event, slots = torch.cuda.Event(), variant.slots[:count]

    def copy() -> None:
        pinned[:count].copy_(slots, non_blocking=True)
        slots.zero_()
        slots[:, 0].fill_(-1)
        event.record()

    ways = {"copy": copy, "publish": lambda: variant.publish(count, pinned, epoch)}
    rows = []
    for timer, unit in ((gpu_time, "gpu_us"), (host_time, "host_us")):
        for way, seconds in race(ways, 50, timer).items():
            row = {"kind": "to the host", "way": way, "slots": count, "unit": unit}
            rows.append(row | {"us": quartiles(seconds)[1] * 1e6})
    return rows


def main() -> None:
    if DRY:
        return save("variants", [])
    BUILD.mkdir(parents=True, exist_ok=True)
    progress("compiling")
    with ThreadPoolExecutor() as pool:
        libraries = dict(
            zip(VARIANTS, pool.map(compile_variant, VARIANTS), strict=True)
        )
    variants = {key: Variant(library) for key, library in libraries.items()}
    progress("measuring")
    base = variants[VARIANTS[0]]
    rows = constants(variants) + lists(base)
    rows += ways_to_the_host(base, 100) + ways_to_the_host(base, 1000)
    save("variants", rows)


if __name__ == "__main__":
    main()
