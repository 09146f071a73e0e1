"""MPS's kernel on the CPU: a stand-in for what torch.mps.compile_shader returns."""

import contextlib
import ctypes
import fcntl
import functools
import os
import shlex
import subprocess
from pathlib import Path

import torch
from emulation import EMULATION

from overflow_fast import _C
from overflow_fast.scanner.metal import MetalScan, source

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "build" / "emulated_metal.so"
SOURCE = ROOT / "tests/cpp/emulated_metal.cpp"


@functools.cache
def library():
    """Compiles the kernel's source by g++ unless that is done."""
    LIBRARY.parent.mkdir(exist_ok=True)
    with LIBRARY.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the workers of xdist want it at once
        build()
    return ctypes.CDLL(str(LIBRARY))


def build():
    sources = [
        SOURCE,
        *ROOT.glob("overflow_fast/scanner/metal/*"),
        *ROOT.glob("tests/cpp/metal_emulation/*"),
    ]
    sources += EMULATION
    newest = max(path.stat().st_mtime for path in sources)
    if not LIBRARY.exists() or LIBRARY.stat().st_mtime < newest:
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        flags = "-std=c++20 -O2 -fno-strict-aliasing -fPIC -shared -Wno-attributes"
        include = f"-I{ROOT / 'tests/cpp/metal_emulation'}"
        command = [*compiler, *flags.split(), include, SOURCE, "-o", LIBRARY]
        subprocess.run(command, check=True)


class Kernel:
    """Called as torch's `_mps_MetalKernel` is (torch/csrc/mps/Module.cpp).

    Positional arguments are bound to buffers in their order: tensors, and lists of
    integers, which arrive as int64 and of which Metal takes 4 KiB.
    """

    def __init__(self, capacity):
        self.capacity, self.num_calls = capacity, 0

    def __call__(self, *args, threads=None, group_size=None, arg_casts=None):
        slots, words, *tensors = args
        assert isinstance(slots, torch.Tensor) and slots.dtype is torch.int64
        assert all(type(word) is int for word in words) and 0 < len(words) <= 512
        assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
        assert len(tensors) == self.capacity and len(args) <= 31
        assert type(threads) is int and arg_casts is None
        assert group_size == 256 and threads > 0 and threads % group_size == 0
        pointers = (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))
        library().metal_launch(
            *(ctypes.c_int64(self.capacity), ctypes.c_void_p(slots.data_ptr())),
            *((ctypes.c_int64 * len(words))(*words), pointers),
            ctypes.c_int64(threads // group_size),
        )
        self.num_calls += 1


class ShaderLibrary:
    """The result of the stand-in for compile_shader."""

    def __init__(self, text):
        assert text == source()
        self.scan_4, self.scan_24 = Kernel(4), Kernel(24)

    @property
    def num_calls(self):
        return self.scan_4.num_calls + self.scan_24.num_calls


@functools.cache
def metal_scan():
    return MetalScan(ShaderLibrary)


@contextlib.contextmanager
def metal(scan=None):
    """Makes the kernel scan the CPU's tensors, where the device's scan is asked for."""
    _C.register_scan("cpu", scan or metal_scan())
    try:
        yield
    finally:
        _C.register_scan("cpu", None)
