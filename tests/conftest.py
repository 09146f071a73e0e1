"""Which tests need a GPU, and the emulated one for those that do not."""

import os
import sys
from pathlib import Path

# Before torch is imported, also for the processes that tests start. Tests that need
# threads ask for them; small models need no pool of processes to be compiled.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch
from emulation import VARIANTS, emulated_device, emulation
from gpus import GPUS, Cuda, Emulated

from overflow_fast.replay import search
from overflow_fast.replay.remedies import trials

# What is tried on a bad step does not depend on what else runs here.
search._LEAST_SECONDS = trials._LEAST_SECONDS = 600.0

# `make test-quick` leaves these out, and the tests marked slow: they start processes,
# compile, or train with other libraries, whose imports alone take seconds.
SLOW = {
    "test_advise_models.py",
    "test_trainer_replays.py",
    "test_agreement.py",
    "test_build.py",
    "test_command_line.py",
    "test_compile_regions.py",
    "test_dead_ranks.py",
    "test_demo.py",
    "test_examples.py",
    "test_environments.py",
    "test_experiment_trackers.py",
    "test_export.py",
    "test_gpu_check.py",
    "test_groups.py",
    "test_guard_device.py",
    "test_guard_self_test.py",
    "test_guard_trainers.py",
    "test_guide.py",
    "test_guides.py",
    "test_help_pages.py",
    "test_integrations.py",
    "test_lightning_watch.py",
    "test_page_in_browser.py",
    "test_parallel.py",
    "test_parity_models.py",
    "test_precision.py",
    "test_readme.py",
    "test_replay_ranks.py",
    "test_run.py",
    "test_site.py",
    "test_torch_internals.py",
    "test_traced_text.py",
    "test_trainer_batches.py",
    "test_trainer_methods.py",
    "test_trainer_numbers.py",
    "test_trainer_pickles.py",
    "test_transformers_numbers.py",
}


# Files that share what takes long to start go to one worker of xdist each, and first.
GROUPS = {
    "test_agreement.py": "processes",
    "test_build.py": "processes",
    "test_command_line.py": "processes",
    "test_dead_ranks.py": "processes",
    "test_groups.py": "processes",
    "test_parallel.py": "processes",
    "test_replay_compiled.py": "compiled",
    "test_replay_ranks.py": "processes",
    "test_run.py": "processes",
    "test_compile.py": "compiled",
    "test_compile_regions.py": "compiled",
    "test_environments.py": "compiled",
    "test_export.py": "compiled",
    "test_precision.py": "compiled",
    "test_traced_text.py": "compiled",
    "test_lightning_watch.py": "lightning",
    "test_trainer_batches.py": "lightning",
    "test_trainer_methods.py": "lightning",
    "test_trainer_numbers.py": "lightning",
    "test_trainer_pickles.py": "lightning",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadFileScheduling

    class ByGroup(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0]
            return GROUPS.get(Path(file).name, file)

    return ByGroup(config, log)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in GROUPS)


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="leave out what is slow")
    parser.addoption(
        "--release", action="store_true", help="compile the packed sources, a minute"
    )
    parser.addoption(
        "--require-cuda",
        action="store_true",
        help="fail the tests that need a GPU, instead of skipping them, without one",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a GPU")
    config.addinivalue_line("markers", "mps: needs a Mac with MPS")
    config.addinivalue_line("markers", "slow: left out with --quick")
    config.addinivalue_line("markers", "release: only with --release")
    gone = SLOW.union(GROUPS) - {
        path.name for path in Path(__file__).parent.rglob("test_*.py")
    }
    if gone:
        raise pytest.UsageError(f"tests/conftest.py names {sorted(gone)}")


def pytest_ignore_collect(collection_path, config):
    is_slow = collection_path.name in SLOW and config.getoption("--quick")
    return True if is_slow else None  # None: others may say


def pytest_runtest_setup(item):
    if item.get_closest_marker("slow") and item.config.getoption("--quick"):
        pytest.skip("slow")
    if item.get_closest_marker("release") and not item.config.getoption("--release"):
        pytest.skip("only with --release: make release-check")
    if item.get_closest_marker("mps") and not torch.backends.mps.is_available():
        pytest.skip("needs MPS")
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


@pytest.fixture(params=GPUS)
def gpu(request):
    """A GPU, emulated or real: see gpus.py."""
    if request.param == "cuda":
        return Cuda()
    return Emulated(request.getfixturevalue("emulated"))


@pytest.fixture(params=VARIANTS)
def variant(request, monkeypatch):
    """Each way to do what only a GPU can decide between, by its name."""
    for variable, value in VARIANTS[request.param].items():
        monkeypatch.setenv(variable, value)
    return request.param


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Leaves nothing compiled to the next test: hooks stay on where something is."""
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.convert_frame.input_codes.seen:
        dynamo.reset()
