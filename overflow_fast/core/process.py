"""The process at hand: its rank among others, and pauses of its garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch.distributed as dist


def has_process_group() -> bool:
    """True once `torch.distributed` has the default process group."""
    return dist.is_available() and dist.is_initialized()


def own_rank() -> int:
    """The rank of this process: 0 without a process group."""
    return dist.get_rank() if has_process_group() else 0


def world_size() -> int:
    """The number of ranks: 1 without a process group."""
    return dist.get_world_size() if has_process_group() else 1


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Pauses the garbage collector while many objects are made that stay in use.

    It would look through the whole program again and again and find nothing to free:
    half of the time in which a guard of 20,000 modules is made. No forward or backward
    of the program's runs within.
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()
