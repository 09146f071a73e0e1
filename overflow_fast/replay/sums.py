"""Follows sums of masks: a mean of what a mask selects divides by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core.memory import StorageMap
from .kinds import Kinds, is_float
from .op_call import OpCall

_SUMS = {"sum", "count_nonzero", "cumsum", "nansum", "bincount"}
_MASK, _SUM, _ZERO, _COUNT = "mask", "sum", "sum of zeros", "sum of mask"
_ORDER = ("", _MASK, _SUM, _ZERO, _COUNT)


class Sums:
    """Knows which tensors are masks, or sums, or computed of one of them alone.

    Args:
        kinds: Knows the magnitudes of tensors.
    """

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds
        self._known: StorageMap[str] = StorageMap()

    def note(self, op: OpCall, fresh: Sequence[torch.Tensor]) -> None:
        """Takes in what an operation returned in memory of its own."""
        read, kind = op.read(floats=False), ""
        if op.base in _SUMS:
            kind = max(map(self._sum_of, read), key=_ORDER.index, default="")
        elif len(read) == 1:
            is_cast = op.base == "_to_copy" and not is_float(read[0])
            kind = _MASK if is_cast else self._known.get(read[0]) or ""
        if kind:
            for tensor in fresh:
                self._known.put(tensor, kind)

    def counts_in(self, op: OpCall) -> list[torch.Tensor]:
        """Finds inputs of an operation that count the elements which a mask selects."""
        read = op.read(floats=False)
        kinds = [self._known.get(tensor) for tensor in read]
        is_mean = len(read) == 2 and all(kinds)  # of what may be nothing but zeros
        return [
            tensor
            for tensor, kind in zip(read, kinds, strict=True)
            if kind == _COUNT or (kind == _ZERO and is_mean)
        ]

    def _sum_of(self, tensor: torch.Tensor) -> str:
        """Classifies the sum of a tensor."""
        if not is_float(tensor) or self._known.get(tensor) == _MASK:
            return _COUNT
        if tensor.numel() == 0:
            return _ZERO
        stat = self._kinds.stat(tensor)
        if stat.abs_max == 1 and stat.abs_min in (0, 1):
            return _COUNT
        return _ZERO if stat.abs_max == 0 else _SUM
