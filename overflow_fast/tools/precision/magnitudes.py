"""Magnitudes of tensors, by powers of two, against the ranges of dtypes."""

from __future__ import annotations

import math

import torch

from ...base.tensors import real_parts
from ...base.text import bits_left
from ...scanner.ops import scan

_EXPONENT_BITS = 8  # of float32
_BIAS = 127  # of float32's exponents
_NUM_BINS = 2**_EXPONENT_BITS
_HALF_OF_LEAST = -25  # float16's least number is 2**-24; below half of it lies 0


class Magnitudes:
    """The magnitudes of all tensors that were added.

    Attributes:
        abs_max: The largest finite magnitude; 0.0 if there was none.
        numel: How many values there were.
        zeros: How many of them were 0.
        has_nan: Whether one was nan.
    """

    def __init__(self) -> None:
        self.abs_max = 0.0
        self.numel = 0
        self.zeros = 0
        self.has_nan = False
        self._bins = torch.zeros(_NUM_BINS, dtype=torch.int64)

    def add(self, tensor: torch.Tensor) -> None:
        """Counts the values of a float or complex tensor. Incurs CPU-GPU syncs."""
        values = _plain(tensor)
        if not values.numel():
            return
        stat = scan([values])[0]
        largest = stat.abs_max
        if stat.has_inf or stat.has_nan or largest is None:
            finite = values[values.isfinite()].abs()
            largest = float(finite.max()) if finite.numel() else 0.0
        self.has_nan |= stat.has_nan
        self.abs_max = max(self.abs_max, float(largest))
        real = real_parts(values)
        bits = real.float().reshape(-1).contiguous().view(torch.int32)
        exponents = (bits >> (32 - 1 - _EXPONENT_BITS)) & (_NUM_BINS - 1)
        self._bins += torch.bincount(exponents, minlength=_NUM_BINS).cpu()
        self.numel += real.numel()
        self.zeros += int((real == 0).sum())

    def bits(self, dtype: torch.dtype) -> float:
        """The headroom: how often the largest magnitude can double within a dtype."""
        return bits_left(torch.finfo(dtype).max, self.abs_max)

    def lost(self, scale: float = 1.0) -> float:
        """The share of the values that float16 makes 0, of those that are not 0.

        That is what lies below 2**-25.

        Args:
            scale: The power of two by which the values are multiplied first.
        """
        nonzero = self.numel - self.zeros
        if not nonzero:
            return 0.0
        exponent = _HALF_OF_LEAST - round(math.log2(scale))
        below = max(0, min(exponent + _BIAS, _NUM_BINS - 1))
        zeros = self.zeros if below else 0
        return (int(self._bins[:below].sum()) - zeros) / nonzero


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()
    return tensor
