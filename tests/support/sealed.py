"""A simulated accelerator, "sealed", whose memory no host code can touch.

tests/cpp/sealed_device.cpp says what it does. `sealed_device()` builds it once and
registers it with torch for the rest of the process. It returns this module, which is
`torch.sealed` from then on.
"""

import fcntl
import functools
import gc
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from contextlib import contextmanager
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests/cpp/sealed_device.cpp"
NAME = "sealed_device_C"
LIBRARY = ROOT / "build" / f"{NAME}.{torch.__version__}.so"
_C = None


def build():
    """Compiles the device unless it is newer than its source; returns its path."""
    LIBRARY.parent.mkdir(exist_ok=True)
    with LIBRARY.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the workers of xdist want it at once
        if not LIBRARY.exists() or LIBRARY.stat().st_mtime < SOURCE.stat().st_mtime:
            _compile()
    return LIBRARY


def _compile():
    from torch.utils.cpp_extension import include_paths

    compiler = shlex.split(os.environ.get("CXX", "g++"))
    cache = [found] if (found := shutil.which("ccache")) else []
    paths = [*include_paths(), sysconfig.get_path("include")]
    flags = f"-std=c++20 -O1 -g0 -w -fPIC -DTORCH_EXTENSION_NAME={NAME}"
    made = LIBRARY.with_suffix(".o")
    command = [*cache, *compiler, *flags.split(), *(f"-I{path}" for path in paths)]
    subprocess.run([*command, "-c", SOURCE, "-o", made], check=True)
    libraries = Path(torch.__file__).parent / "lib"
    link = [*compiler, "-shared", made, "-o", LIBRARY, f"-L{libraries}"]
    names = ("c10", "torch", "torch_cpu", "torch_python")
    subprocess.run([*link, *(f"-l{name}" for name in names)], check=True)


@functools.cache
def sealed_device():
    """Registers the device with torch for the rest of the process."""
    global _C
    spec = importlib.util.spec_from_file_location(NAME, build())
    _C = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_C)
    torch.utils.rename_privateuse1_backend("sealed")
    module = sys.modules[__name__]
    torch._register_device_module("sealed", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return module


# What torch asks of the module of a device.

_initialized = True


def is_available():
    return True


def is_initialized():
    return True


def _lazy_init():
    pass


def _is_in_bad_fork():
    return False


def device_count():
    return 2


def current_device():
    return _C.get_device()


def set_device(device):
    _C.set_device(_index(device))


def synchronize(device=None):
    _C.synchronize()


def get_amp_supported_dtype():
    return [torch.float16, torch.bfloat16]


def manual_seed(seed):
    _C.seed_all(seed)


def manual_seed_all(seed):
    _C.seed_all(seed)


def get_rng_state(device="sealed"):
    return _C.get_state(_index(device))


def set_rng_state(state, device="sealed"):
    _C.set_state(_index(device), state)


def _index(device):
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return _C.get_device() if index is None else index


class device:
    def __init__(self, of):
        self._index = _index(of)

    def __enter__(self):
        self._before = _C.get_device()
        _C.set_device(self._index)

    def __exit__(self, *exception):
        _C.set_device(self._before)


# What a test asks.


class Seen(dict):
    """Counts by name: "op", "view", "copy to host", "host faults", "aten::amax" ..."""

    def __missing__(self, name):
        return 0

    @property
    def waits(self):
        """How often the host waits for a real device that did the same."""
        waits = ("wait: ", "sync ", "blocking copy to device")
        return sum(n for name, n in self.items() if name.startswith(waits))

    @property
    def faults(self):
        """How often the host has touched the device's memory."""
        return self["host faults"]


@contextmanager
def watched():
    """Counts what happens on the device within the block."""
    gc.collect()  # the end of another test's guard waits for the device
    gc.disable()
    before = _C.counts()
    seen = Seen()
    try:
        yield seen
    finally:
        gc.enable()
    for name, number in _C.counts().items():
        if number != before.get(name, 0):
            seen[name] = number - before.get(name, 0)
    _C.seal()


@contextmanager
def late():
    """Work on side streams, and copies that do not block, run as late as they may."""
    _C.set_late(True)
    try:
        yield
    finally:
        _C.set_late(False)


@contextmanager
def slow_events(queries):
    """Events answer so often that they have not passed."""
    _C.set_slow_queries(queries)
    try:
        yield
    finally:
        _C.set_slow_queries(0)


@contextmanager
def pageable():
    """The device has no pinned memory."""
    _C.set_pinned(False)
    try:
        yield
    finally:
        _C.set_pinned(True)


@contextmanager
def memory_limit(more):
    """There is no room for more than these bytes besides what is in use."""
    _C.set_limit(_C.memory()[0] + more)
    try:
        yield
    finally:
        _C.set_limit(8 << 30)


def own_offset():
    """From a tensor's address to that at which the device sees its memory."""
    return _C.own_offset()


@contextmanager
def life():
    """Ends with the device alive, whether or not `die()` was called."""
    try:
        yield
    finally:
        _C.set_dead(False)


def die():
    """Whatever asks the device for work, or about work, raises from here on."""
    _C.set_dead(True)


def fail_later(text):
    """Asynchronous work fails: the next wait of the host raises that."""
    _C.set_error(text)
