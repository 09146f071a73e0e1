"""Finds leaves by where they lie in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import torch

from ..base.tensors import PLAIN, extent_of
from .leaves import Leaf
from .memory import memory_of

_Extent = tuple[int, int]  # the bytes of a memory where a tensor begins and ends
_ALL = (0, sys.maxsize)


class LeafMap:
    """Finds leaves by the part of the memory that they take up.

    Several may lie in one memory: engines put weights into flat buffers.
    """

    def __init__(self, leaves: Iterable[Leaf]) -> None:
        self._leaves: dict[int, dict[_Extent, Leaf]] = {}
        for leaf in leaves:
            if leaf.tensor is not None:
                for key in memory_of(leaf.tensor):
                    own = self._leaves.setdefault(key, {})
                    own.setdefault(_extent_of(leaf.tensor), leaf)

    def overlapping(self, tensor: torch.Tensor) -> dict[_Extent, Leaf]:
        """The leaves that have memory in common with a tensor, by where they lie."""
        begin, end = _extent_of(tensor)
        return {
            extent: leaf
            for key in memory_of(tensor)
            for extent, leaf in self._leaves.get(key, {}).items()
            if extent[0] < end and begin < extent[1]
        }

    def read_by(
        self, tensor: torch.Tensor, is_bad: Callable[[Leaf], bool], most: int
    ) -> list[Leaf]:
        """So many leaves that a tensor is of, the bad ones, in which no other lies."""
        found = self.overlapping(tensor)
        if len(found) > 1:  # they share memory, as in an engine's flat buffers
            bad = [(e, leaf) for e, leaf in found.items() if is_bad(leaf)]
            found = dict(bad or list(found.items())[:most])
        inner = [
            leaf
            for own, leaf in found.items()
            if not any(own[0] <= b and e <= own[1] for b, e in found if (b, e) != own)
        ]
        return inner[:most]

    def around(self, tensor: torch.Tensor) -> Leaf | None:
        """The leaf that a tensor is, or else the only one of which it is a part."""
        (begin, end), found = _extent_of(tensor), self.overlapping(tensor)
        if (begin, end) in found:
            return found[begin, end]
        within = [leaf for (b, e), leaf in found.items() if b <= begin and end <= e]
        return within[0] if len(within) == 1 else None


def _extent_of(tensor: torch.Tensor) -> _Extent:
    is_known = type(tensor) in PLAIN and tensor.layout is torch.strided
    return extent_of(tensor) if is_known else _ALL
