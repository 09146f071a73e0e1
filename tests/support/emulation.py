"""CUDA's kernels on the CPU: builds the emulation, hands out a device of it."""

import contextlib
import ctypes
import fcntl
import functools
import os
import shlex
import subprocess
from pathlib import Path

from overflow_fast import _C

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "build" / "emulated_device.so"
KERNELS = sorted((ROOT / "csrc/scan/cuda").glob("*.cu"))
EMULATION = [*ROOT.glob("tests/cpp/cuda_emulation/*"), ROOT / "tests/cpp/fibers.h"]
SOURCES = [ROOT / "tests/cpp/emulated_device.cpp", ROOT / "csrc/scan/variants.cpp"]


# Environment variables that choose other ways to do the same: csrc/scan/variants.h.
VARIANTS = {
    "default": {},
    "kernel": {"OVERFLOW_FAST_STEP_END": "kernel"},
    "mapped": {"OVERFLOW_FAST_STEP_END": "mapped"},
    "lists": {
        "OVERFLOW_FAST_CUDA_SMALL_LISTS": "0",
        "OVERFLOW_FAST_CUDA_LARGE_LISTS": "0",
        "OVERFLOW_FAST_CUDA_BLOCKS": "1",
    },
}


class State(ctypes.Structure):
    """As in emulated_device.cpp."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "stream",
            "is_capturing",
            "holds_events",
            "fails_scans",
            "fails_events",
            "fails_streams",
            "fails_ends",
            "num_scans",
            "scanned_on",
            "num_ends",
            "num_waits",
            "num_stream_waits",
            "num_synchronizations",
            "num_events",
            "ended_stream",
            "wrong_scans",
            "has_died",
            "has_own_streams",
            "capturing_thread",
            "num_records",
            "own_offset",
        )
    ]


def build():
    """Compiles the emulation unless it is newer than its sources; returns its path."""
    LIBRARY.parent.mkdir(exist_ok=True)
    with LIBRARY.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the workers of xdist want it at once
        return _build()


def _build():
    sources = [*ROOT.glob("csrc/scan/*.h"), *ROOT.glob("csrc/scan/cuda/*")]
    sources += [*SOURCES, *EMULATION]
    newest = max(path.stat().st_mtime for path in sources)
    if not LIBRARY.exists() or LIBRARY.stat().st_mtime < newest:
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        flags = "-std=c++20 -O2 -fno-strict-aliasing -fPIC -shared -Wno-unknown-pragmas"
        include = f"-I{ROOT / 'tests/cpp/cuda_emulation'}"
        command = [*compiler, *flags.split(), include, *SOURCES, "-x", "c++", *KERNELS]
        subprocess.run([*command, "-o", LIBRARY], check=True)
    return LIBRARY


class EmulatedDevice:
    """The emulation's streams, events and graphs; fields as in `State`."""

    def __init__(self):
        self.library = ctypes.CDLL(str(build()))
        self.library.emulated_state.restype = ctypes.POINTER(State)
        self.state = self.library.emulated_state().contents

    def register(self, type="cpu", own_offset=0):
        self.state.own_offset = own_offset
        self._register(self.library.emulated_open, type)
        _C.check_kernels(type)
        self.library.emulated_reset()

    def register_fresh(self, **state):
        """Registers a device that was never used, in a state."""
        self._register(self.library.emulated_open_fresh)
        for name, value in state.items():
            setattr(self.state, name, value)

    def _register(self, opener, type="cpu"):
        self.library.emulated_reset()
        address = ctypes.cast(opener, ctypes.c_void_p).value
        _C.register_device_type(type, address)

    def unregister(self, type="cpu"):
        _C.register_device_type(type, 0)

    @contextlib.contextmanager
    def capture(self):
        self.state.is_capturing = 1
        yield
        self.state.is_capturing = 0

    def replay(self):
        self.library.emulated_replay()


@functools.cache
def emulated_device():
    return EmulatedDevice()


@contextlib.contextmanager
def emulation(wanted=True, type="cpu", own_offset=0):
    """Registers the emulation for the CPU, or another type, if that is wanted.

    Args:
        wanted: Whether it is.
        type: The type of its tensors' device.
        own_offset: From their addresses to those at which kernels see their memory.
    """
    if wanted:
        emulated_device().register(type, own_offset)
    try:
        yield
    finally:
        if wanted:
            emulated_device().unregister(type)


@contextlib.contextmanager
def emulation_off():
    """Takes the emulation from the CPU meanwhile, if it is registered there."""
    is_on = _C.has_kernels("cpu")
    if is_on:
        _C.register_device_type("cpu", 0)
    try:
        yield
    finally:
        if is_on:
            emulated_device().register()
