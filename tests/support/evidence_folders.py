"""Runs that leave evidence, and what is in their folders."""

import contextlib
import json

import pytest
from guarding import INF, batches, make, plant, train_step

from overflow_fast import OverflowGuard
from overflow_fast.options import Evidence


def bad_steps(folder, count=1, spoil=None, mib=256, keep=4, **arguments):
    model, optimizer = make()
    data = batches(count)
    evidence = Evidence(folder, mib=mib, keep=keep)
    with OverflowGuard(
        model, optimizer, "skip", evidence=evidence, **arguments
    ) as guard:
        for batch in data:
            with plant(model.blocks[1].fc2, INF):
                train_step(model, optimizer, batch)
    return guard, data


def strict(path):
    """The view of a reader that takes JSON alone."""
    return json.loads(path.read_text(), parse_constant=pytest.fail)


def step_folders(folder):
    """The evidence in a folder, by its place under the runs' folders."""
    return {
        path.parent.name: path.parent
        for path in sorted(folder.glob("overflow_fast/*/*/overflow_fast.json"))
    }


@contextlib.contextmanager
def no_file_beyond(size):
    """As on a full disk, for this process: a write beyond a file's size fails."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
