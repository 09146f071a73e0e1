"""The rank of the process at hand."""

from __future__ import annotations

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
