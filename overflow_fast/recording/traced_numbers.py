"""Numbers that identify a tensor across the frames of a trace."""

from __future__ import annotations

import itertools
import weakref
from typing import NamedTuple

import torch

from ..torch_internals.compiler import functional_mode, is_functional, traced_value

_counter = itertools.count()
_ATTRIBUTE = "_overflow_fast"


class _Number(NamedTuple):
    """The number of a value, in the trace that `mode` stands for."""

    owner: weakref.ref[torch.Tensor]
    mode: weakref.ref[object]
    call: int  # of the owner's root
    number: int


def begin_call(owner: torch.Tensor) -> None:
    """Forgets an owner's numbers: its root is called again in the same trace.

    Args:
        owner: The `handle_tensor` of its `root_hook`.
    """
    setattr(owner, _ATTRIBUTE, getattr(owner, _ATTRIBUTE, 0) + 1)


def number_of(tensor: torch.Tensor, owner: torch.Tensor) -> tuple[int, bool]:
    """Returns a value's number in the trace, and whether it is new to its owner.

    Args:
        tensor: The tensor that holds the value; another one after each write.
        owner: The `owner_handle` of the hook that sees it.

    Returns:
        The number, or -1 where AOTAutograd does not trace, and whether it is new.
    """
    mode = functional_mode()
    if mode is None or not is_functional(tensor):
        return -1, True
    value = traced_value(tensor)
    call = getattr(owner, _ATTRIBUTE, 0)
    numbers: list[_Number] = value.__dict__.setdefault(_ATTRIBUTE, [])
    for known in numbers:
        if known.owner() is owner and known.mode() is mode and known.call == call:
            return known.number, False
    numbers.append(_Number(weakref.ref(owner), weakref.ref(mode), call, next(_counter)))
    return numbers[-1].number, True
