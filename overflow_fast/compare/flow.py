"""Of one row: what it was computed from, and what kind of numbers it has."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..core.tensors import dtype_named
from .judged_rows import Difference


@dataclass
class Flow:
    """The worst of what something was computed from.

    Attributes:
        relative: The largest relative difference.
        variance: The squared relative error of the roundings since there was one.
        width: The longest dimension that may have been summed over.
        norm: The largest norm of a float input.
        terms: How many rows that input has.
    """

    relative: float = 0.0
    variance: float = 0.0
    width: int = 1
    norm: float = 0.0
    terms: int = 1

    def add(self, relative: float, variance: float, width: int = 1) -> None:
        """Adds a tensor that was used."""
        if relative:
            self.relative = max(self.relative, relative)
            self.variance = max(self.variance, variance)
        self.width = max(self.width, width)


def width(row: Difference) -> int:
    """The longest of the last two dimensions."""
    return max(row.shapes[1][-2:], default=1)


def underflow(row: Difference, dtype: str) -> float:
    """The relative error of numbers so small that a dtype has few or no bits for them.

    Each is off by at most half of the smallest subnormal number.
    """
    kind = dtype_named(dtype)
    if kind is None or not kind.is_floating_point or not row.reference_norm:
        return 0.0
    limits = torch.finfo(kind)
    half = limits.smallest_normal * limits.eps / 2
    numel = math.prod(row.shapes[1])
    return half * math.sqrt(numel) / row.reference_norm


def is_odd(row: Difference) -> bool:
    """Tells whether the two do not have the same numbers of nan and inf."""
    one_sided = row.measures is not None and bool(row.measures.num_one_sided)
    is_same = row.num_nan[0] == row.num_nan[1] and row.num_inf[0] == row.num_inf[1]
    return one_sided or not is_same


def is_mask(row: Difference) -> bool:
    """Tells whether an input holds the lowest number of a dtype, as masks do."""
    if row.place.role != "input":
        return False
    low, _, reference_low, _ = row.ranges
    return _is_lowest(low, row.dtypes[0]) or _is_lowest(reference_low, row.dtypes[1])


def _is_lowest(value: float, dtype: str) -> bool:
    kind = dtype_named(dtype)
    if kind is None or not kind.is_floating_point:
        return False
    return value <= 0.99 * torch.finfo(kind).min
