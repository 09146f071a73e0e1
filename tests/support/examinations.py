"""Examinations by real processes, in which faults are planted."""

import contextlib
import dataclasses
import gc
import os
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from processes import context

from overflow_fast.tools.doctor.examination import Examination
from overflow_fast.tools.doctor.rendezvous import Address, connect
from overflow_fast.tools.doctor.stage import ExaminationSettings

PATIENCE = 120  # seconds until a test counts as hung


def examine(world, stages, **options):
    """What `begin` says of an examination that has ended."""
    return begin(world, stages, **options)()


def begin(world, stages, absent=(), **settings):
    """Begins an examination; returns what waits for its end.

    That returns the diagnosis of each rank that comes, and whether it leads. A rank
    that its test freezes has neither.
    """
    store = connect("localhost", 0, is_host=True)
    folder = tempfile.TemporaryDirectory()
    settings = ExaminationSettings(**{"limit": 60.0, "grace": 20.0, **settings})
    arguments = world, store.port, stages, settings, Path(folder.name)
    processes = {
        rank: context().Process(target=_examined, args=(rank, *arguments))
        for rank in range(world)
        if rank not in absent
    }
    for process in processes.values():
        process.start()

    def end():
        nonlocal store
        with folder as name:
            found = _end(processes, Path(name))
        store = None  # the ranks have needed it until now
        return found

    return end


def _end(processes, folder):
    for rank, process in processes.items():
        frozen = folder / f"frozen{rank}"
        process.join(0 if frozen.exists() else PATIENCE)
        if process.exitcode is None and not frozen.exists():
            process.join(PATIENCE)
    for process in processes.values():
        process.kill()  # those that are frozen
        process.join()
    return {
        rank: torch.load(folder / str(rank), weights_only=False)
        for rank in processes
        if (folder / str(rank)).exists()
    }


def _examined(rank, world, port, stages, settings, folder):
    gc.freeze()  # no collection looks at what the server has imported
    if not dist.is_gloo_available():
        return
    os.environ["LOCAL_RANK"] = str(rank)
    os.environ["EXAMINATION"] = str(folder)
    address = Address(rank, world, "localhost", port, False, "test")
    examination = Examination(address, settings, stages)
    diagnosis = examination.run()
    torch.save((diagnosis, examination.is_leader), folder / str(rank))
    examination.part()


class Planted:
    """A stage's run with a fault on one rank; picklable, as stages are."""

    def __init__(self, stage, rank, fault):
        self.run, self.rank, self.fault = stage.run, rank, fault

    def __call__(self, site):
        if site.rank != self.rank:
            return self.run(site)
        return self.fault(self.run, site)


def planted(stage, rank, fault):
    """A stage in which a rank has a fault: a function of the run and the site."""
    return dataclasses.replace(stage, run=Planted(stage, rank, fault))


@contextlib.contextmanager
def replaced(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def killed(run, site):
    site.note("a fault")
    os.kill(os.getpid(), signal.SIGKILL)


def frozen(run, site):
    os.kill(os.getpid(), signal.SIGSTOP)
    return run(site)
