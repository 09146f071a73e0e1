"""Scans by every backend there is, from tensors on the CPU."""

from unittest import mock

import pytest
import torch
from emulation import emulation_off
from metal import metal, metal_scan
from sealed import sealed_device, watched

from overflow_fast import _C, scan
from overflow_fast.scanner import ops
from overflow_fast.scanner.fallback import fallback_module
from overflow_fast.scanner.ops import scan_with

# The CPU's kernels, torch operations, the same on a device of their own, CUDA's and
# MPS's kernels emulated, what stands for the extension, and a GPU.
BACKENDS = [
    "auto",
    "composite",
    pytest.param("sealed", marks=pytest.mark.sealed),
    "emulated",
    "metal",
    "fallback",
    pytest.param("cuda", marks=pytest.mark.cuda),
    pytest.param("mps", marks=pytest.mark.mps),
]


def on_device(tensor, device):
    """The tensor there with the same strides, offset and surroundings."""
    storage = tensor.untyped_storage().to(device=device)
    empty = torch.empty(0, dtype=tensor.dtype, device=device)
    return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def on_mps(tensor):
    """The tensor on MPS; skips the test if there is no such dtype there."""
    try:
        return on_device(tensor, "mps")
    except (TypeError, RuntimeError) as error:
        pytest.skip(f"MPS has no {tensor.dtype}: {error}")


def scan_on(tensors, backend):
    """The stats of CPU tensors by a backend; "emulated" needs its fixture."""
    if backend == "emulated":
        return scan_with(tensors, _C.ScanBackend.DEVICE)
    if backend == "metal":
        with emulation_off(), metal():
            stats = scan_with(tensors, _C.ScanBackend.DEVICE)
        assert metal_scan()._kernels or not tensors, "torch operations scanned instead"
        return stats
    if backend == "fallback":
        with mock.patch.object(ops, "_C", fallback_module()):
            return scan(tensors)
    if backend == "mps":
        return scan([on_mps(tensor) for tensor in tensors])
    if backend == "sealed":
        sealed_device()
        there = [on_device(tensor, backend) for tensor in tensors]
        with watched() as seen:
            stats = scan(there)
        assert seen.waits == bool(tensors) and seen.faults == 0
        return stats
    if backend == "cuda":
        return scan([on_device(tensor, backend) for tensor in tensors])
    return scan(tensors, backend=backend)
