"""The wider dtypes that a step, or a part of it, is run in, and the casts to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..base.tensors import has_memory

HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32)
_FLOAT8 = [e for e in vars(torch).values() if str(e).startswith("torch.float8")]

Casts = Mapping[torch.dtype, torch.dtype]
# What each wide dtype is put in place of. float16 overflows where bfloat16 does not.
TO_BFLOAT16: Casts = {torch.float16: torch.bfloat16}
TO_FLOAT32: Casts = dict.fromkeys(HALF, torch.float32)
TO_FLOAT64: Casts = {
    **dict.fromkeys([*_FLOAT8, *FLOATS], torch.float64),
    **dict.fromkeys((torch.complex32, torch.complex64), torch.complex128),
}
CASTS = {
    torch.bfloat16: TO_BFLOAT16,
    torch.float32: TO_FLOAT32,
    torch.float64: TO_FLOAT64,
}


def cast(each: Any, casts: Casts) -> Any:
    """A tensor in a wider dtype, the dtype that stands for another, or what it is."""
    if isinstance(each, torch.dtype):
        return casts.get(each, each)
    is_narrow = isinstance(each, torch.Tensor) and _can_be_cast(each, casts)
    return each.to(casts[each.dtype]) if is_narrow else each


def cast_leaf(tensor: torch.Tensor, casts: Casts) -> torch.Tensor:
    """A leaf with the values of a tensor in a wider dtype, or a wide tensor itself."""
    if not _can_be_cast(tensor, casts):
        return tensor
    copy = tensor.detach().to(casts[tensor.dtype])
    return copy.requires_grad_() if tensor.requires_grad else copy


def _can_be_cast(tensor: torch.Tensor, casts: Casts) -> bool:
    """False for others, and for freed memory: to read that would end the process."""
    is_there = tensor.layout is not torch.strided or has_memory(tensor)
    return tensor.dtype in casts and is_there
