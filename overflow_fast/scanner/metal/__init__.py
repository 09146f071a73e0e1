"""MPS's kernel: Metal source that torch compiles at run time, and its dispatches.

No Mac has run it yet. Before its first use it is compared with the CPU's kernel; torch
operations serve MPS where it cannot be compiled or where the two differ.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ... import _C
from ...base.text import error_line

_log = logging.getLogger("overflow_fast")
_HERE = Path(__file__).parent


class MetalScan:
    """The operator `overflow_fast::scan` for tensors on MPS.

    Args:
        compile_shader: As `torch.mps.compile_shader`: takes Metal source, returns an
            object whose attributes are its kernels.
    """

    def __init__(self, compile_shader: Callable[[str], Any]) -> None:
        self._compile = compile_shader
        self._kernels: dict[int, Any] | None = None
        self._is_tried = False

    def __call__(
        self, slots: torch.Tensor, first: int, tensors: list[torch.Tensor]
    ) -> None:
        """Combines the stat of tensors[i] into slots[first + i].

        Does not incur a CPU-GPU sync, but for the first call.

        Args:
            slots: int64 of shape [n, 4], contiguous.
            first: The first tensor's slot.
            tensors: Strided tensors on the device of `slots`.
        """
        if not self._is_tried:
            self._is_tried = True
            self._kernels = self._tried_kernels(slots.device)
        if self._kernels is None:
            _by_torch(slots, first, tensors)
        else:
            _dispatch(self._kernels, slots, first, tensors)

    def _tried_kernels(self, device: torch.device) -> dict[int, Any] | None:
        try:
            library = self._compile(source())
            kernels = {4: library.scan_4, _C.METAL_MAX_TENSORS: library.scan_24}
            if _agrees(kernels, device):
                return kernels
            why = "its results differ from the CPU's"
        except Exception as error:
            why = error_line(error)
        _log.warning(
            "MPS's kernel is not used: %s.\n"
            "Torch operations scan tensors on MPS, which takes several times as long.",
            why,
        )
        return None


def source() -> str:
    """Returns the text to compile: one, since torch finds no files of ours."""
    return "\n".join((_HERE / f"{name}.metal").read_text() for name in ("keys", "scan"))


def register() -> None:
    """Makes the kernel serve MPS, where there is MPS and torch compiles shaders."""
    if torch.backends.mps.is_available() and hasattr(torch.mps, "compile_shader"):
        _C.register_scan("mps", MetalScan(torch.mps.compile_shader))


def _by_torch(slots: torch.Tensor, first: int, tensors: list[torch.Tensor]) -> None:
    torch.ops.overflow_fast.scan_composite(slots, first, tensors)


def _dispatch(
    kernels: dict[int, Any],
    slots: torch.Tensor,
    first: int,
    tensors: list[torch.Tensor],
) -> None:
    plan = _C.metal_launches(tensors)
    for i in plan.others:
        _by_torch(slots, first + i, [tensors[i]])
    for launch in plan.launches:
        begin, count = launch.first, launch.count
        if launch.num_threads == 0:
            continue
        capacity = next(size for size in kernels if count <= size)
        some = tensors[begin : begin + count]
        # A kernel's parameters must all be bound: the first tensor takes the rest.
        some += [some[0]] * (capacity - count)
        rows = slots[first + begin : first + begin + count]
        kernels[capacity](
            rows,
            launch.words,
            *some,
            threads=launch.num_threads,
            group_size=_C.METAL_THREADS,
        )


def _agrees(kernels: dict[int, Any], device: torch.device) -> bool:
    """True if kernels and CPU agree on a few tensors. Incurs a CPU-GPU sync."""
    x = torch.linspace(-3, 70000, 40_000, device=device)
    x[7], x[20_000], x[39_999] = torch.nan, torch.inf, -torch.inf
    half = x.to(torch.float16)
    tensors = [x, half, half[1:], half.view(200, 200)[3:, ::3], (x > 0)[5:9]]
    tensors += [torch.arange(-5, 3, device=device), half.view(torch.int8)]
    count = len(tensors)
    expected = _empty_slots(count, torch.device("cpu"))
    torch.ops.overflow_fast.scan(expected, 0, [tensor.cpu() for tensor in tensors])
    small, large = _empty_slots(count, device), _empty_slots(count, device)
    for first in range(0, count, 4):
        _dispatch(kernels, small, first, tensors[first : first + 4])
    _dispatch(kernels, large, 0, tensors)
    return all(torch.equal(slots.cpu(), expected) for slots in (small, large))


def _empty_slots(count: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([[-1, 0, 0, 0]] * count, device=device)
