"""The rows of a batch whose outputs are not finite."""

from __future__ import annotations

from typing import Any

import torch

from ...base.tensors import widened
from ...base.tree import tensors
from ..watching.inputs import is_plain


def bad_rows(output: Any, size: int | None) -> tuple[list[int] | None, int]:
    """The rows of what a forward has returned that hold a nan, or else an inf.

    Incurs a CPU-GPU sync for each tensor on a device.

    Args:
        output: What it has returned.
        size: How many rows it was given.

    Returns:
        The rows, and how many there are; None and 0 where the output has none.
    """
    all_of = [each for _, each in tensors(output) if is_plain(each)]
    found = [each for each in all_of if each.dim() and len(each) == size]
    if size is None or not found:
        return None, 0
    for is_bad in (is_nan_or_inf, _is_not_finite):  # -inf alone may be a mask
        places = set[int]()
        for tensor in found:
            bad = is_bad(widened(tensor)).reshape(size, -1).any(1)
            places.update(bad.nonzero().flatten().tolist())
        if places:
            return sorted(places), size
    others = [each for each in all_of if all(each is not one for one in found)]
    if any(bool(is_nan_or_inf(widened(each)).any()) for each in others):
        return None, 0  # such as a loss, which is of all rows
    return [], size


def is_nan_or_inf(values: torch.Tensor) -> torch.Tensor:
    """True where a value is nan or inf, which no mask has."""
    return values.isnan() | (values == torch.inf)


def _is_not_finite(values: torch.Tensor) -> torch.Tensor:
    return ~values.isfinite()
