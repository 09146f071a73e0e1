"""The floor of every scan: the fastest plain read of the same bytes that was found."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from facts import ROOT, find_nvcc
from timing import DEVICE, ON_GPU, QUICK

HERE = Path(__file__).parent
BUILD = ROOT / "build" / "benchmarks"
FLAGS = ["-std=c++20", "-O3", "-march=native", "-Wno-psabi"]
Read = Callable[[torch.Tensor], object]


@functools.cache
def plain_read() -> Read:
    """Compiles and returns the function that reads every byte of a tensor once.

    On a GPU it reads whole 16-byte vectors. Where there is no nvcc, and in quick runs
    on the CPU, it is torch's sum of bytes: `floor_kind` says so.
    """
    nvcc = find_nvcc() if ON_GPU else None
    if nvcc:
        return _of_the_gpu(nvcc)
    return sum_of_bytes if ON_GPU or QUICK else _of_the_cpu()


def sum_of_bytes(tensor: torch.Tensor) -> object:
    return tensor.view(torch.uint8).sum()


def floor_kind() -> str | None:
    """What replaces the floor, if it cannot be compiled."""
    if ON_GPU and find_nvcc() is None:
        return "nvcc was not found: torch's sum of bytes stands for the plain read"
    return None


def _of_the_cpu() -> Read:
    import torch.utils.cpp_extension

    BUILD.mkdir(parents=True, exist_ok=True)
    # The compiler driver finds ninja beside the interpreter.
    folder = os.path.dirname(sys.executable)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    module = torch.utils.cpp_extension.load(
        "overflow_fast_plain_read",
        [str(HERE / "plain_read.cpp")],
        extra_cflags=FLAGS,
        build_directory=str(BUILD),
    )
    check = torch.zeros(1 << 20, dtype=torch.uint8)
    check[-1] = 5
    assert module.plain_read(check) == 5
    return module.plain_read


def nvcc_library(nvcc: str, source: str, name: str, *flags: str) -> ctypes.CDLL:
    """Compiles a source of this folder for the GPU that is there, and loads it."""
    BUILD.mkdir(parents=True, exist_ok=True)
    library = BUILD / f"{name}.so"
    command = [nvcc, "-std=c++20", "-O3", "-arch=native", "-Xcompiler", "-fPIC"]
    command += [*flags, "-shared", str(HERE / source), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def _of_the_gpu(nvcc: str) -> Read:
    function = nvcc_library(nvcc, "plain_read.cu", "plain_read_gpu").plain_read
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
