"""A rank that dies or hangs: the others get the group's own error, and no hang."""

import datetime
import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from guarding import batches, make, train_step
from processes import context
from ranks import PATIENCE
from torch.distributed.distributed_c10d import _set_pg_timeout

from overflow_fast import OverflowGuard

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

WORLD = 4


def _train(rank, folder, fate, are_others_done):
    """Trains four steps, of which the last rank makes two; writes what was raised."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=PATIENCE,
    )
    model, optimizer = make()
    guard = OverflowGuard(model, optimizer, process_group=dist.group.WORLD)
    error = None
    try:
        for step, batch in enumerate(batches(4)):
            if step == 2 and rank == WORLD - 1:
                if fate == "dies":
                    os._exit(7)
                are_others_done.wait()
                os._exit(8)
            if step == 2 and fate == "hangs":  # nobody answers, however long one waits
                _set_pg_timeout(datetime.timedelta(seconds=1), dist.group.WORLD)
            train_step(model, optimizer, batch)
    except Exception as caught:
        error = caught
    found = (guard.step, type(error).__name__, str(error), guard.coverage().failures)
    torch.save(found, folder / str(rank))
    os._exit(0)  # a group with a dead rank cannot be destroyed


@pytest.mark.parametrize("fate", ["dies", "hangs"])
def test_the_others_get_the_groups_own_error(fate):
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("no gloo: torch was built without it")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        are_others_done = context().Event()
        processes = [
            context().Process(target=_train, args=(rank, folder, fate, are_others_done))
            for rank in range(WORLD)
        ]
        for process in processes:
            process.start()
        *others, last = processes
        for process in others:
            process.join(PATIENCE.total_seconds())
        are_others_done.set()
        last.join()
        hung = [process for process in others if process.is_alive()]
        for process in hung:
            process.kill()
        assert not hung
        assert [p.exitcode for p in processes] == [0, 0, 0, 7 if fate == "dies" else 8]
        for rank in range(WORLD - 1):
            step, error, message, failures = torch.load(folder / str(rank))
            # The optimizer did not step, and nobody calls it a failure of the guard.
            assert (step, failures) == (2, 0)
            assert error == "RuntimeError" or error.startswith("Dist"), error
            assert "onnection" in message or "imed out" in message, message
