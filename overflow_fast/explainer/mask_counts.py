"""Finds the tensors that count the elements which a mask selects."""

from __future__ import annotations

from typing import Any

import torch

from ..base.torch_ops import has
from .op_call import OpCall
from .tensor_kinds import Kinds, is_float

# A mean of what a mask selects divides by the mask's count. Where that is 0, the mean
# is 0 / 0, and the report says that nothing was selected. A divisor is such a count by
# how it was made: it sums integers, what was cast from them, or values whose largest
# magnitude is 1 and whose smallest is 0 or 1; or it is computed of such a sum alone. A
# sum of zeros may be one, and counts as one where it divides another sum. A loss whose
# labels are all ignored is likewise a sum of nothing.

_MASK, _SUM, _ZERO, _COUNT = "mask", "sum", "sum of zeros", "sum of mask"
_UNLABELED = "loss of no label"
_ORDER = ("", _MASK, _SUM, _ZERO, _COUNT, _UNLABELED)


class MaskCounts:
    """Finds which divisors count the elements that a mask selects.

    Args:
        kinds: Knows the magnitudes of tensors.
    """

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds
        self._known: dict[int, str] = {}

    def note(self, op: OpCall) -> None:
        """Takes in what an operation returned in memory of its own."""
        fresh = op.fresh
        is_cast, is_sum = has(op.base, "casts"), has(op.base, "adds")
        is_loss = has(op.base, "of_labels")
        if not fresh or not (self._known or is_cast or is_sum or is_loss):
            return
        read, kind = op.read(floats=False), ""
        if is_loss and len(fresh) > 1 and has_no_label(op):
            fresh, kind = fresh[:1], _UNLABELED
        elif is_sum:
            kind = max(map(self._sum_of, read), key=_ORDER.index, default="")
        elif len(read) == 1 and fresh[0].numel() == read[0].numel():  # and no median
            is_mask = is_cast and not is_float(read[0])
            kind = _MASK if is_mask else self._kind_of(read[0])
        if kind:
            for tensor in fresh:
                self._known[self._kinds.number_of(tensor)] = kind

    def sums_no_label(self, value: Any) -> bool:
        """True for a sum of losses to which no label has added one."""
        is_tensor = isinstance(value, torch.Tensor)
        return is_tensor and self._kind_of(value) == _UNLABELED

    def counts_in(self, op: OpCall) -> list[torch.Tensor]:
        """Finds inputs of an operation that count the elements which a mask selects."""
        read = op.read(floats=False)
        kinds = [self._kind_of(tensor) for tensor in read]
        is_mean = len(read) == 2 and all(kinds)  # of what may be nothing but zeros
        return [
            tensor
            for tensor, kind in zip(read, kinds, strict=True)
            if kind == _COUNT or (kind == _ZERO and is_mean)
        ]

    def _kind_of(self, tensor: torch.Tensor) -> str:
        return self._known.get(self._kinds.number_of(tensor), "")

    def _sum_of(self, tensor: torch.Tensor) -> str:
        """Classifies the sum of a tensor."""
        known = self._kind_of(tensor)
        if known == _UNLABELED:
            return _UNLABELED
        if not is_float(tensor) or known == _MASK:
            return _COUNT
        if tensor.numel() == 0:
            return _ZERO
        ((_, stat),) = self._kinds.of([tensor])
        if stat.abs_max == 1 and stat.abs_min in (0, 1):
            return _COUNT
        return _ZERO if stat.abs_max == 0 else _SUM


def has_no_label(op: OpCall) -> bool:
    """True if a loss adds up no label: all are ignored."""
    labels, reduction, ignored = op.args[1], op.args[3], op.args[4]
    return reduction != 0 and bool((labels == ignored).all())
