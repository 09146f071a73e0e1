"""Facts about memory, which hold for every tensor that shares it."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

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
