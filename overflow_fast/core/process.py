"""The process at hand: its rank, its settings, and pauses of its garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
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


def settings_of_torch() -> dict[str, Any]:
    """The switches of torch that change results or speed, by their names there."""
    backends: Any = torch.backends
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cuda.matmul.allow_tf32": backends.cuda.matmul.allow_tf32,
        "cudnn.allow_tf32": backends.cudnn.allow_tf32,
        "cudnn.benchmark": backends.cudnn.benchmark,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": str(torch.get_default_dtype()),
    }


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
