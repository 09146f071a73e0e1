"""Parts of a batch, along dimension 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..core.tensors import has_memory
from .kept_call import KeptCall
from .kinds import is_float


def batch_size(call: KeptCall) -> int | None:
    """The size of dimension 0 that the tensors of a batch share, or None."""
    tensors = [tensor for _, tensor in call.leaves() if tensor.dim()]
    plain = [each for each in tensors if type(each) is torch.Tensor]
    if not all(map(has_memory, plain)):
        return None
    sizes = {len(tensor) for tensor in tensors}
    return sizes.pop() if len(sizes) == 1 else None


def part_of(call: KeptCall, rows: Sequence[int]) -> KeptCall:
    """The same call with some of the samples of its batch."""
    size = batch_size(call) or 0
    part = type(call)(call.function, _cut(call.batch, rows, size), call.ambient)
    part.returns_loss = call.returns_loss
    part.held = {
        place: held[list(rows)] if held.dim() and len(held) == size else held
        for place, held in call.held.items()
    }
    return part


def _cut(batch: Any, rows: Sequence[int], size: int) -> Any:
    if isinstance(batch, torch.Tensor):
        if not batch.dim() or len(batch) != size:
            return batch
        part = batch.detach()[list(rows)]
        wants = batch.requires_grad and is_float(batch)
        return part.requires_grad_() if wants else part
    if type(batch) is dict:
        return {key: _cut(each, rows, size) for key, each in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(_cut(each, rows, size) for each in batch)
    return batch
