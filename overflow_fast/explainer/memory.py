"""The memory of tensors: its number, and what it held before it was written to."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.multiprocessing import reductions

from ..torch_internals.tensor_internals import storage_number, storage_of


def memory_of(tensor: torch.Tensor) -> int:
    """The number of a tensor's memory; 0 for a tensor that has none."""
    storage = storage_of(tensor)
    return 0 if storage is None else storage_number(storage)


_weakly: Any = reductions.StorageWeakRef


class Memories:
    """Numbers memory: a fact about a number is one about each tensor in that memory.

    A weak reference keeps a number from being given out again once its memory is freed.
    """

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}
        self._without = itertools.count(-1, -1)

    def number_of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's memory; without one a new number below 0."""
        storage = storage_of(tensor)
        if storage is None:
            return next(self._without)
        number = storage_number(storage)
        if number not in self._held:
            self._held[number] = _weakly(storage)
        return number


# What memory held.


@dataclass(eq=False)
class Contents:
    """The contents of some memory between two writes to it.

    Attributes:
        memory: A number for the memory.
        storage: The memory itself, or a copy once somebody is about to write to it;
            None if that was too large.
        nbytes: Its size.
        numel: How many elements it has.
        is_made: Whether an operation of the trace has written it, not the program
            before.
        num_holders: How many tensors are held that have it.
        wide: The memory in float64, once somebody has asked for it.
    """

    memory: int
    storage: torch.UntypedStorage | None
    nbytes: int
    numel: int
    is_made: bool
    num_holders: int = 0
    wide: torch.Tensor | None = None

    @property
    def is_held(self) -> bool:
        """True if it can still be read; a wrapper may free a weight's memory."""
        return self.storage is not None and self.storage.nbytes() == self.nbytes


class TapedTensor(NamedTuple):
    """A tensor as an operation has read or written it.

    Attributes:
        contents: What its memory held.
        dtype: Its dtype.
        device: Its device.
        size: Its size.
        stride: Its strides.
        offset: Where it begins in its memory.
    """

    contents: Contents
    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @property
    def memory(self) -> int:
        """A number for its memory."""
        return self.contents.memory

    @property
    def is_float(self) -> bool:
        """True if it holds numbers with a fraction."""
        return self.dtype.is_floating_point

    @property
    def whole(self) -> torch.Tensor:
        """All of its memory, as one row of elements."""
        flat = torch.empty(0, dtype=self.dtype, device=self.device)
        assert self.contents.storage is not None
        return flat.set_(self.contents.storage)

    @property
    def wide(self) -> torch.Tensor:
        """All of its memory in float64, which nobody writes to."""
        found = self.contents.wide
        if found is None:
            found = self.contents.wide = self.whole.double()
        return found

    @property
    def value(self) -> torch.Tensor:
        """Its values as they were."""
        return self.of(self.whole)

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor in other memory of the same layout."""
        return memory.as_strided(self.size, self.stride, self.offset)
