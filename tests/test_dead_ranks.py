"""A rank that dies or hangs: the others get the group's own error, and no hang."""

import datetime
import os
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from guarding import batches, make, train_step
from processes import context
from ranks import free_port

from overflow_fast import OverflowGuard

WORLD = 4
TIMEOUT = datetime.timedelta(seconds=4)
PATIENCE = 60  # seconds until a process counts as hung


def _train(rank, port, folder, fate):
    """Trains four steps, of which the last rank makes two; writes what was raised."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=WORLD,
        timeout=TIMEOUT,
    )
    model, optimizer = make()
    guard = OverflowGuard(model, optimizer, process_group=dist.group.WORLD)
    error = None
    try:
        for step, batch in enumerate(batches(4)):
            if rank == WORLD - 1 and step == 2:
                if fate == "dies":
                    os._exit(7)
                time.sleep(3 * TIMEOUT.total_seconds())
                os._exit(8)
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
        folder, port = Path(name), free_port()
        processes = [
            context().Process(target=_train, args=(rank, port, folder, fate))
            for rank in range(WORLD)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(PATIENCE)
        hung = [process for process in processes if process.is_alive()]
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
