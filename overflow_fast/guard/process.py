"""The process at hand: its rank and its settings."""

from __future__ import annotations

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
    """The switches of torch that change results or speed, by their names there.

    The older ones of TF32 raise in a program that sets `fp32_precision`, which has the
    value of either.
    """
    backends: Any = torch.backends
    return {
        "cuda.matmul.fp32_precision": backends.cuda.matmul.fp32_precision,
        "cudnn.conv.fp32_precision": backends.cudnn.conv.fp32_precision,
        "cudnn.rnn.fp32_precision": backends.cudnn.rnn.fp32_precision,
        "mkldnn.matmul.fp32_precision": backends.mkldnn.matmul.fp32_precision,
        "cudnn.benchmark": backends.cudnn.benchmark,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": str(torch.get_default_dtype()),
    }
