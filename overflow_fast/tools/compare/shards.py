"""Parts of tensors that several ranks share, at their places in the whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import torch
from msgspec import Meta

from ...guard.files.fields import Count
from ...torch_internals.tensor_internals import local_tensor
from .signed_sums import chunks

Shape = Annotated[tuple[Count, ...], Meta(max_length=64)]


class Shard(NamedTuple):
    """The place of a rank's part in the whole tensor.

    Attributes:
        shape: The whole tensor's.
        offset: The index of the part's first element.
        partial: The rank's numbers in the mesh dimensions over which parts are summed.
    """

    shape: Shape
    offset: Shape
    partial: Shape = ()


def part_of(tensor: torch.Tensor) -> Shard | str | None:
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
    return Shard(tuple(tensor.shape), tuple(offset), tuple(partial))


def pieces(
    values: torch.Tensor, part: Shard | None
) -> Iterator[tuple[torch.Tensor, int]]:
    """Yields what is summed of a tensor, and its flat indices in the whole.

    Args:
        values: A plain tensor.
        part: Its place; None for a whole tensor.
    """
    start = 0
    if part is not None and values.shape[1:] == part.shape[1:]:  # one range of indices
        start = part.offset[0] * math.prod(part.shape[1:]) if part.shape else 0
    elif part is not None and values.numel():  # laid out among zeros
        whole = values.new_zeros(part.shape)
        pairs = zip(part.offset, values.shape, strict=True)
        whole[tuple(slice(begin, begin + size) for begin, size in pairs)] = values
        values = whole
    yield from chunks(values, start)
