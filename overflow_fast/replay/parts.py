"""Parts of a batch, along dimension 0."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ..core.tensors import has_memory
from ..tree import CALL_DEPTH, NotRebuilt, mapped
from .kept_call import KeptCall
from .kinds import is_float


def batch_size(call: KeptCall) -> int | None:
    """The size of dimension 0 that its tensors share; None if it cannot be cut."""
    tensors = [tensor for _, tensor in call.leaves() if tensor.dim()]
    plain = [each for each in tensors if type(each) is torch.Tensor]
    if not all(map(has_memory, plain)):
        return None
    sizes = {len(tensor) for tensor in tensors}
    return sizes.pop() if len(sizes) == 1 and not why_whole(call) else None


def why_whole(call: KeptCall) -> str:
    """Returns why no part of a batch can be made, as a clause, or ""."""
    try:
        mapped(call.batch, torch.Tensor.detach, CALL_DEPTH)
    except NotRebuilt as error:
        return str(error)
    return ""


def part_of(call: KeptCall, rows: Sequence[int]) -> KeptCall:
    """The same call with some of the samples of its batch."""
    size = batch_size(call) or 0
    cut = functools.partial(_cut, rows=list(rows), size=size)
    part = type(call)(call.function, mapped(call.batch, cut, CALL_DEPTH), call.ambient)
    part.returns_loss = call.returns_loss
    part.held = {
        place: held[list(rows)] if held.dim() and len(held) == size else held
        for place, held in call.held.items()
    }
    return part


def _cut(tensor: torch.Tensor, rows: list[int], size: int) -> torch.Tensor:
    if not tensor.dim() or len(tensor) != size:
        return tensor
    part = tensor.detach()[rows]
    wants = tensor.requires_grad and is_float(tensor)
    return part.requires_grad_() if wants else part
