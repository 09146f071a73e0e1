"""The memory of tensors: facts about it, and what it held before it was written to.

A fact about memory holds for every tensor that shares it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.multiprocessing import reductions

from ..base.tensors import PLAIN
from ..torch_internals.tensor_internals import storage_number, storages


def memory_of(tensor: torch.Tensor) -> dict[int, torch.UntypedStorage]:
    """The storages of a tensor by their numbers, as `storages()`; of most at once."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
        return storages(tensor)
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # within a transform
        return {}
    return {storage_number(storage): storage}


_Fact = TypeVar("_Fact")
_weakly: Any = reductions.StorageWeakRef


class StorageMap(Generic[_Fact]):
    """Maps memory to a fact, until it is freed; given out again, it is other memory."""

    def __init__(self) -> None:
        self._facts: dict[int, tuple[Any, _Fact]] = {}

    def __len__(self) -> int:
        return len(self._facts)

    def get(self, tensor: torch.Tensor) -> _Fact | None:
        """The fact about a tensor's memory, or None."""
        for key in memory_of(tensor) if self._facts else ():
            known = self._facts.get(key)
            if known is not None and not known[0].expired():
                return known[1]
        return None

    def put(self, tensor: torch.Tensor, fact: _Fact) -> None:
        """Notes a fact in place of what there was."""
        for key, storage in memory_of(tensor).items():
            self._facts[key] = _weakly(storage), fact

    def drop(self, tensor: torch.Tensor) -> None:
        """Forgets the fact about a tensor's memory."""
        for key in memory_of(tensor) if self._facts else ():
            self._facts.pop(key, None)


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
