"""The part of an operation that makes one bad value, where all of it is too large."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..base.tensors import PLAIN, real_parts
from ..base.torch_ops import has
from ..base.tree import tensors_in
from .bounds import is_near
from .float64 import require_repeatable
from .op_call import OpCall
from .tensor_kinds import as_plain, is_float

# Of all arguments together, which are copied to float64: larger ones may end the run
# for want of memory, and of smaller ones a part may be computed where all could be.
_MAX_NUMEL = 2**27

_Cut = Mapping[int, int]  # the place that is left of an axis, by axis


def is_large(op: OpCall) -> bool:
    """True if the arguments of an operation are too large to be copied."""
    arguments = [*map(as_plain, tensors_in((op.args, op.kwargs)))]
    if any(type(t) not in PLAIN for t in arguments):
        raise NotImplementedError("a tensor subclass")
    return sum(tensor.numel() for tensor in arguments) > _MAX_NUMEL


def part_of(
    op: OpCall, bad: torch.Tensor, index: tuple[int, ...]
) -> tuple[OpCall, torch.Tensor, tuple[int, ...]]:
    """The part of a large operation that makes one bad value, or its row.

    That it is the same computation is found by experiment: it is run as it was, and
    must return that part of the result.

    Args:
        op: The operation, which has run.
        bad: A tensor that it returned, which is not finite.
        index: A place in it.

    Returns:
        The operation with parts of its arguments, which has run as well, and `bad` and
        `index` there.

    Raises:
        NotImplementedError: If there is no such part, or it is too large as well.
    """
    require_repeatable(op.func, op.args, op.kwargs)
    results = [t for t in op.returned if is_float(t)]
    place = next((i for i, each in enumerate(results) if each is bad), None)
    if op.written or place is None:
        raise NotImplementedError("too large")
    for axes, cuts in _cuts(op, bad, index):
        part = _cut(op, cuts)
        if is_large(part):
            continue
        try:
            again = part.run()
        except (RuntimeError, IndexError):
            continue
        own = [t for t in tensors_in(again) if is_float(t)][place]
        bad_part = _narrowed(bad, dict(zip(axes, index, strict=False)))
        if is_near(real_parts(own), real_parts(bad_part)):
            inner = [0 if axis in axes else i for axis, i in enumerate(index)]
            return part, own, tuple(inner)
    raise NotImplementedError("too large")


def _cut(op: OpCall, cuts: Sequence[_Cut]) -> OpCall:
    left = iter(cuts)

    def part(value: Any) -> Any:
        is_cut = isinstance(value, torch.Tensor)
        return _narrowed(value, next(left)) if is_cut else value

    args = tuple(map(part, op.args))
    return OpCall(op.func, args, {k: part(value) for k, value in op.kwargs.items()})


def _cuts(
    op: OpCall, bad: torch.Tensor, index: tuple[int, ...]
) -> Iterator[tuple[Sequence[int], Sequence[_Cut]]]:
    """Yields axes of the result to cut, from the first on, and each argument's cut."""
    values = *op.args, *op.kwargs.values()
    given = [each for each in values if isinstance(each, torch.Tensor)]
    every = range(len(index))

    def broadcast(tensor: torch.Tensor) -> _Cut:
        places = zip(tensor.shape, index[len(index) - tensor.dim() :], strict=True)
        return {axis: i for axis, (n, i) in enumerate(places) if n > 1}

    def rows(tensor: torch.Tensor, axes: Sequence[int]) -> _Cut:
        sizes = zip(tensor.shape, bad.shape, strict=False)
        return {i: index[i] for i, (n, m) in enumerate(sizes) if i in axes and n == m}

    if torch.Tag.pointwise in op.func.tags:
        yield every, [*map(broadcast, given)]
    elif has(op.base, "product"):
        *batch, row, column = index
        left = dict(enumerate([*batch, row]))
        right = {**dict(enumerate(batch)), len(index) - 1: column}
        yield every, [*map(broadcast, given[:-2]), left, right]
    for axes in (every[:-1], every[:1]):
        cuts = [rows(tensor, axes) for tensor in given]
        yield axes, cuts
        yield axes, [*cuts[:1], *({} for _ in cuts[1:])]


def _narrowed(tensor: torch.Tensor, places: _Cut) -> torch.Tensor:
    for axis, place in places.items():
        tensor = tensor.narrow(axis, place, 1)
    return tensor
