"""A layer computed again, alone, in another dtype, and how far apart the results are.

A `LayerCall` can be computed again in any dtype: weights, buffers, attributes and
random states are afterwards what they were, bit for bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...base.tree import CALL_DEPTH, mapped
from ...explainer.tensor_kinds import floats_in
from .copies import on_copies, to_dtype


@dataclass
class LayerCall:
    """One call of a module. One that has called others is not computed again.

    Attributes:
        module: The module.
        given: Copies of its arguments and keyword arguments, as they were before the
            call; None where no copy can be made of them.
        output: What it returned.
        has_inner: Whether it called other modules that have hooks.
        is_random: Whether it drew random numbers.
    """

    module: nn.Module
    given: Any = None
    output: Any = None
    has_inner: bool = False
    is_random: bool = False

    def computed(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """The floats that the module returns with inputs and weights in a dtype.

        Everything is as before afterwards. Raises what the module raises.
        """
        cast = functools.partial(to_dtype, dtype=dtype)
        args, kwargs = copied_given(self.given, cast)
        with on_copies(self.module, dtype), torch.no_grad():
            return floats_in(self.module.forward(*args, **kwargs))


@dataclass
class RelativeDifference:
    """A relative L2 difference, summed up over tensors in float64.

    Attributes:
        squares: The sum of the squares of the differences.
        reference: The sum of the squares of the float32 values.
    """

    squares: float = 0.0
    reference: float = 0.0

    @property
    def relative(self) -> float:
        """The relative L2 difference; inf where something became inf or nan."""
        if not self.squares:
            return 0.0
        return math.sqrt(self.squares / self.reference) if self.reference else math.inf

    def add(self, value: torch.Tensor, reference: torch.Tensor) -> None:
        """Adds a tensor, where the float32 one is finite. Incurs CPU-GPU syncs."""
        wide, golden = _as_float64(value), _as_float64(reference)
        is_finite = golden.isfinite()
        golden = golden.where(is_finite, 0)
        squares = float((wide.where(is_finite, 0) - golden).abs().square().sum())
        self.squares += squares if math.isfinite(squares) else math.inf
        self.reference += float(golden.abs().square().sum())


def copied_given(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value with each tensor changed, without graphs, in containers of its own.

    Raises:
        NotRebuilt: If no copy can be made of it.
    """
    return mapped(value, lambda each: change(each.detach()), CALL_DEPTH, anew=True)


def _as_float64(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.device.type == "mps":  # has no float64
        tensor = tensor.cpu()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
