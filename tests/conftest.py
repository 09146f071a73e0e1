"""Which tests need a GPU, and the emulated one for those that do not."""

import os
import sys

# Before torch is imported, also for the processes that tests start. Tests that need
# threads ask for them; small models need no pool of processes to be compiled.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch
from emulation import emulated_device, emulation


def pytest_addoption(parser):
    parser.addoption(
        "--require-cuda",
        action="store_true",
        help="fail the tests that need a GPU, instead of skipping them, without one",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a GPU")


def pytest_runtest_setup(item):
    if item.get_closest_marker("cuda") is None or torch.cuda.is_available():
        return
    if item.config.getoption("--require-cuda"):
        pytest.fail("--require-cuda was given, and torch sees no GPU", pytrace=False)
    pytest.skip("needs a GPU")


@pytest.fixture(scope="module")
def emulated_kernels():
    """CUDA's kernels for tensors on the CPU, where the device's are asked for."""
    with emulation():
        yield


@pytest.fixture
def emulated():
    """The CPU as a CUDA device, for detectors made with `_defer=True`."""
    with emulation():
        yield emulated_device()


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Leaves nothing compiled to the next test: hooks stay on where something is."""
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.convert_frame.input_codes.seen:
        dynamo.reset()
