"""Runs a function in several processes of one process group."""

import datetime
import functools
import gc
import importlib
import sys
import tempfile
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from processes import start_method

PATIENCE = datetime.timedelta(minutes=5)  # until a collective counts as hung


def backend():
    """NCCL where there is a GPU for each of four ranks, else gloo."""
    return "nccl" if torch.cuda.device_count() >= 4 else "gloo"


def device():
    """The device of this rank."""
    if dist.get_backend() == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", dist.get_rank())


def _run(rank, world, folder, over, function, arguments):
    gc.freeze()  # no collection looks at what the server has imported
    torch.set_num_threads(1)
    url = f"file://{folder}/store"
    if over == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        over, init_method=url, rank=rank, world_size=world, timeout=PATIENCE
    )
    torch.save(function(*arguments), folder / str(rank))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(world, function, *arguments, over=None):
    """The results of a function of a test module on each rank, in order.

    They communicate by the backend `over`, or by the one that backend() names.

    The first rank's error fails the test.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("no gloo: torch was built without it")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.multiprocessing.start_processes(
            _run,
            (world, folder, over or backend(), function, arguments),
            nprocs=world,
            start_method=start_method(),
        )
        return [torch.load(folder / str(rank)) for rank in range(world)]


# Test modules whose SCENARIOS run in one group of four processes, one after another:
# starting the processes takes longer than all of them. All are of the group of tests
# `processes`: in another worker of xdist they would run once more.
_MODULES = ("test_agreement", "test_groups", "test_replay_ranks", "test_suspects")
_FOLDERS = ("guard/ranks", "guard/report", "explainer")


def _run_scenarios():
    # pytest has put the folders of those that it collected on the path, and no others.
    sys.path += [str(Path(__file__).parents[1] / folder) for folder in _FOLDERS]
    found = {}
    for module in map(importlib.import_module, _MODULES):
        for name, scenario in module.SCENARIOS.items():
            try:
                found[module.__name__, name] = scenario()
            except Exception:
                found[module.__name__, name] = traceback.format_exc()
    return found


@functools.cache
def _results():
    return on_ranks(4, _run_scenarios)


def all_of(module, scenario):
    """The results of a scenario of a test module on each of four ranks.

    The traceback of what it raises there.
    """
    return [found[module, scenario] for found in _results()]
