"""Tests by day and by night, their order, and which need a GPU or an emulated one."""

import collections
import contextlib
import functools
import gc
import importlib
import os
import re
import sys
import zlib
from pathlib import Path

# Before torch is imported, also for the processes that tests start. Tests that need
# threads ask for them; small models need no pool of processes to be compiled.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# What the processor lists it has: not compiled and loaded once more in each process.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

import pytest
import torch
from emulation import VARIANTS, emulated_device, emulation
from fresh import Fresh
from gpus import GPUS, Cuda, Emulated, Sealed
from kept_texts import TEXTS, AsKept, all_kept, differences
from processes import serve_from_here
from sealed import sealed_device

from overflow_fast import _C
from overflow_fast.explainer import budget, replayer
from overflow_fast.guard import guards_of_process

# What is run again and tried does not depend on what else runs here.
budget.LEAST_SECONDS = replayer.LEAST_SECONDS = 600.0
replayer.LONG_SECONDS = 600.0

with contextlib.suppress(ImportError):  # where it is missing, its tests say so
    from hypothesis import settings

    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")

# With --renew: the texts before, and the functions of which some cases do not run.
BEFORE, IN_PART = pytest.StashKey(), pytest.StashKey()

collect_ignore = ["cpp", "files", "golden", "support"]

# The layer of the tests in a folder, which is their mark.
LAYERS = {
    "base": "scan",
    "scanner": "scan",
    "detector": "detector",
    "guard": "guard",
    "explainer": "explain",
    "tools": "tools",
    "integrations": "tools",
    "project": "tools",
}


def pytest_configure(config):
    """The processes that tests start are forks of their worker, as it is from here on.

    They have what takes long to import, which no test of the simulated device needs.
    """
    if config.getoption("--sealed"):
        sealed_device()
    config.stash[IN_PART] = set()
    if config.getoption("--renew"):
        config.stash[BEFORE] = all_kept()
    if hasattr(config, "workerinput") and not config.getoption("--sealed"):
        for name in ("torch._inductor.compile_fx", "transformers.modeling_utils"):
            importlib.import_module(name)
        serve_from_here()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Sends files with a common mark `xdist_group` to one worker, as one file.

    xdist's own `loadgroup` writes groups into the ids of tests, which pytest 9.2 no
    longer lets it. The process that schedules collects nothing: it reads the file.
    """
    from xdist.scheduler import LoadFileScheduling

    @functools.cache
    def group_of(file):
        text = (config.rootpath / file).read_text()
        group = re.search(r'mark\.xdist_group\("(\w+)"\)', text)
        return group[1] if group else file

    class ByGroup(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return group_of(nodeid.split("::")[0])

    return ByGroup(config, log)


def pytest_collection_modifyitems(config, items):
    """Groups first, since they take longest; each test has the mark of its layer."""
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
    root = Path(__file__).parent
    for item in items:
        folder, *inner = item.path.relative_to(root).parts
        if inner:
            item.add_marker(LAYERS[folder])
    # A run of their own: torch has one accelerator, from before its first backward on.
    chosen = config.getoption("--sealed")
    keep_only([i for i in items if is_marked(i, "sealed") == chosen], items, config)
    if when := config.getoption("--when"):
        by_day = of_the_day(items)
        keep_only([i for i in items if (i in by_day) == (when == "day")], items, config)


def pytest_collection_finish():
    """Tests start with what was imported apart from what the collector looks through.

    That is a million objects by then: a collection of all takes 0.5 s, and so does each
    explanation, which asks for the iterators that are there.
    """
    gc.collect()
    gc.freeze()


def keep_only(kept, items, config):
    config.hook.pytest_deselected(items=list(set(items) - set(kept)))
    items[:] = kept


def is_marked(item, *names):
    return any(item.get_closest_marker(name) for name in names)


def of_the_day(items):
    """The tests of `make test`: one case of each function, the same one each time.

    All cases of what has the mark `day`, and none of what is `slow` without it.
    """
    cases = collections.defaultdict(list)
    for item in items:
        if not is_marked(item, "day", "slow", "cuda", "mps", "release"):
            cases[function_of(item)].append(item)
    chosen = {min(each, key=chance_of) for each in cases.values()}
    return chosen | {item for item in items if is_marked(item, "day")}


def function_of(item):
    return item.nodeid.partition("[")[0]


def pytest_deselected(items):
    for item in items:
        item.config.stash[IN_PART].add(function_of(item))


def chance_of(item):
    """A number of its name, which stays if other cases come or go."""
    return zlib.crc32(item.nodeid.encode())


def pytest_addoption(parser):
    parser.addoption(
        "--when",
        choices=["day", "night"],
        help="run the tests of `make test`, or all others; without it, all",
    )
    parser.addoption(
        "--release", action="store_true", help="compile the packed sources, a minute"
    )
    parser.addoption(
        "--renew", action="store_true", help="keep the texts of tests as they are today"
    )
    parser.addoption(
        "--sealed",
        action="store_true",
        help="run the tests of the simulated device, and no others",
    )
    parser.addoption(
        "--skip-missing",
        action="store_true",
        help="skip the tests whose packages are not installed, instead of failing",
    )
    parser.addoption(
        "--require-cuda",
        action="store_true",
        help="fail the tests that need a GPU, instead of skipping them, without one",
    )


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return without_missing(collector, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    return without_missing(item, (yield))


def without_missing(node, report):
    """Makes a failure a skip, if it is that of a package that is not installed."""
    if report.failed and node.config.getoption("--skip-missing"):
        found = re.search(
            r"ModuleNotFoundError: No module named '(\w+)", str(report.longrepr)
        )
        if found and found[1] != "overflow_fast":
            report.outcome = "skipped"
            report.longrepr = (str(node.path), 1, f"Skipped: {found[1]} is missing")
    return report


def pytest_runtest_setup(item):
    if item.get_closest_marker("release") and not item.config.getoption("--release"):
        pytest.skip("only with --release: make release-check")
    if item.get_closest_marker("mps") and not torch.backends.mps.is_available():
        pytest.skip("needs MPS")
    lacking = lacks_cuda() if item.get_closest_marker("cuda") else ""
    if lacking and item.config.getoption("--require-cuda"):
        pytest.fail(f"--require-cuda was given, and {lacking}", pytrace=False)
    if lacking:
        pytest.skip(lacking)


@functools.cache
def lacks_cuda():
    """Why the tests that need a GPU cannot run, or ""."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return "" if _C.has_kernels("cuda") else "the extension has no kernels of CUDA"


@pytest.fixture(scope="session")
def renews(request):
    """The files of texts that were written anew; None without --renew."""
    return set() if request.config.getoption("--renew") else None


@pytest.fixture
def as_kept(request, renews):
    """Compares texts with those that are kept for the test: see kept_texts.py."""
    torch.manual_seed(0)
    node = request.node
    path = TEXTS / request.path.stem / f"{node.originalname}.txt"
    parameters = node.name.removeprefix(node.originalname)
    is_named = any("[" in each for each in request.config.args)
    is_whole = not is_named and function_of(node) not in request.config.stash[IN_PART]
    return AsKept(path, parameters, renews, is_whole)


def pytest_terminal_summary(terminalreporter, config):
    """Shows what `--renew` has changed."""
    if config.getoption("--renew"):
        terminalreporter.write_line("\n".join(differences(config.stash[BEFORE])))


@pytest.fixture(scope="session")
def fresh():
    """Runs code in a process that has imported torch alone; returns what it prints."""
    server = Fresh()
    yield server
    server.close()


@pytest.fixture
def made(request):
    """What `make` of the test's file makes: a model and its optimizer."""
    return request.module.make()


@pytest.fixture
def model(made):
    return made[0]


@pytest.fixture
def optimizer(made):
    return made[1]


@pytest.fixture(autouse=True)
def no_guard_is_left():
    """Guards end with their test: no other test meets what they have changed.

    One that was not removed is a cycle, and an exception or a cache may hold it.
    """
    yield
    for parts in list(guards_of_process._guards):
        parts.disable()


@pytest.fixture
def validated():
    """Distributions look at their parameters: dynamo switches that off for good."""
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(True)
    yield
    torch.distributions.Distribution.set_default_validate_args(before)


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


@pytest.fixture
def untried(request, monkeypatch):
    """Explanations end where remedies would be tried, which takes half of their time.

    For modules whose tests ask for none, but for those with the mark `tries_remedies`.
    """
    if request.node.get_closest_marker("tries_remedies") is None:
        monkeypatch.setattr(
            "overflow_fast.explainer.search.find_remedies", lambda *_: None
        )


@pytest.fixture(params=GPUS)
def gpu(request):
    """A GPU, emulated or real: see gpus.py."""
    if request.param == "cuda":
        return Cuda()
    if request.param == "sealed":
        return Sealed()
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
