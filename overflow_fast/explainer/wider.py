"""The wider dtypes that a step, or a part of it, is run in, and the casts to them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..base.tensors import HALF, has_memory
from ..torch_internals.tensor_internals import pytree
from .torch_calls import TorchCalls, tensors_among

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

# How a program casts to each.
CAST_METHODS = {
    **{torch.float16: "half", torch.bfloat16: "bfloat16"},
    **{torch.float32: "float", torch.float64: "double"},
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


def run_wider(
    func: Any, args: Any, kwargs: Any, casts: Casts, *target: torch.Tensor
) -> Any:
    """Runs a torch call with tensors and dtypes that are wider, without autocast.

    Args:
        func: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        casts: The dtypes, by those that they stand for.
        target: What it writes to, which comes first and stays as it is.
    """
    with autocast_off((target, args, kwargs)):
        args, kwargs = cast_all((args, kwargs), casts)
        return func(*target, *args, **kwargs)


def autocast_off(given: Any) -> AbstractContextManager[object]:
    """Turns autocast off for the device of the tensors that a call is given."""
    return torch.autocast(_device_of(given), enabled=False)


class WiderAutocast(TorchCalls):
    """Casts to a wider dtype where autocast casts to one that it stands for.

    For the calls of the thread that enters it, and of autograd's while they work for
    that one.

    Args:
        dtype: bfloat16, or float32, for which autocast is off.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def on_call(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """See `TorchCalls`; records none."""
        device = _device_of((args, kwargs))
        has_autocast = torch.amp.is_autocast_available(device)
        is_on = has_autocast and torch.is_autocast_enabled(device)
        if not is_on or torch.get_autocast_dtype(device) not in CASTS[self._dtype]:
            return func(*args, **kwargs)
        is_on = self._dtype is not torch.float32
        with torch.autocast(device, self._dtype if is_on else None, enabled=is_on):
            return func(*args, **kwargs)


def _device_of(given: Any) -> str:
    tensors = tensors_among(given)
    return tensors[0].device.type if tensors else "cpu"


def cast_all(value: Any, casts: Casts) -> Any:
    """A value whose tensors and dtypes are wider; see `cast()`."""
    return pytree.tree_map(lambda each: cast(each, casts), value)


def _can_be_cast(tensor: torch.Tensor, casts: Casts) -> bool:
    """False for others, and for freed memory: to read that would end the process."""
    is_there = tensor.layout is not torch.strided or has_memory(tensor)
    return tensor.dtype in casts and is_there
