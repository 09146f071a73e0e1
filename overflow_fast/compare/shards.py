"""Parts of tensors that several ranks share, at their places in the whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..torch_internals.wrappers import local_tensor
from .fingerprint import chunks

_MAX_SLAB = 2**22  # elements of the whole tensor that are laid out at once


@dataclass(frozen=True)
class Part:
    """The place of a rank's part in the whole tensor.

    Attributes:
        shape: The whole tensor's.
        offset: The index of the part's first element.
        partial: The rank's numbers in the mesh dimensions over which parts are summed.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    partial: tuple[int, ...] = ()

    @property
    def is_partial(self) -> bool:
        """Tells whether the whole is a sum of parts like this one."""
        return bool(self.partial)

    def to_plain(self) -> list[list[int]]:
        """The part as lists of integers."""
        return [list(self.shape), list(self.offset), list(self.partial)]


def part_of(tensor: torch.Tensor) -> Part | str | None:
    """The place of this rank's part of a DTensor.

    Returns:
        None for any other tensor; the reason, if the placement is not understood.
    """
    local = local_tensor(tensor)
    if local is None:
        return None
    whole: Any = tensor
    shape, offset = list(tensor.shape), [0] * tensor.dim()
    coordinate, partial = whole.device_mesh.get_coordinate(), list[int]()
    if coordinate is None:
        return "this rank is not in its mesh"
    for dim, placement in enumerate(whole.placements):
        if placement.is_partial():
            if placement.reduce_op != "sum":
                return f"parts are combined by {placement.reduce_op}"
            partial.append(coordinate[dim])
        elif type(placement).__name__ == "Shard":
            along = placement.dim
            size = -(-shape[along] // whole.device_mesh.size(dim))
            begin = min(coordinate[dim] * size, shape[along])
            offset[along] += begin
            shape[along] = min(size, shape[along] - begin)
        elif not placement.is_replicate():
            return f"placement {placement}"
    if tuple(shape) != tuple(local.shape):
        return f"placement {whole.placements} with a part of {tuple(local.shape)}"
    return Part(tuple(tensor.shape), tuple(offset), tuple(partial))


def pieces(values: torch.Tensor, part: Part | None) -> Iterator[tuple[Any, int]]:
    """Yields what is summed of a tensor, and its flat indices in the whole.

    Args:
        values: A plain tensor.
        part: Its place; None for a whole tensor.
    """
    if part is None or not values.numel():
        yield from chunks(values)
        return
    rest = part.shape[1:]
    stride = math.prod(rest)
    if tuple(values.shape[1:]) == tuple(rest):  # one range of flat indices
        yield from chunks(values, part.offset[0] * stride if part.shape else 0)
        return
    step = max(1, _MAX_SLAB // stride)
    inner = tuple(
        slice(begin, begin + size)
        for begin, size in zip(part.offset[1:], values.shape[1:], strict=True)
    )
    for first in range(0, values.shape[0], step):
        rows = values[first : first + step]
        slab = rows.new_zeros((rows.shape[0], *rest))
        slab[(slice(None), *inner)] = rows
        yield from chunks(slab, (part.offset[0] + first) * stride)
