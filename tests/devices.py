"""Scans by every backend there is, from tensors on the CPU."""

import pytest
import torch

from overflow_fast import _C, scan
from overflow_fast.ops import _scan

# The CPU's kernels, torch operations, CUDA's kernels emulated, and CUDA's on a GPU.
BACKENDS = [
    "auto",
    "composite",
    "emulated",
    pytest.param("cuda", marks=pytest.mark.cuda),
]


def on_cuda(tensor):
    """The tensor on the GPU with the same strides, offset and surroundings."""
    storage = tensor.untyped_storage().cuda()
    empty = torch.empty(0, dtype=tensor.dtype, device="cuda")
    return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def scan_on(tensors, backend):
    """The stats of CPU tensors by a backend; "emulated" needs its fixture."""
    if backend == "emulated":
        return _scan(tensors, _C.ScanBackend.DEVICE)
    if backend == "cuda":
        return scan([on_cuda(tensor) for tensor in tensors])
    return scan(tensors, backend=backend)
