"""Facts about memory, which hold for every tensor that shares it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.multiprocessing import reductions

from ..torch_internals.replay_internals import storage_id
from ..torch_internals.tensor_internals import sparse_values
from ..torch_internals.wrappers import local_tensor

_Fact = TypeVar("_Fact")
_weakly: Any = reductions.StorageWeakRef


def storages(tensor: torch.Tensor | None) -> Iterator[torch.UntypedStorage]:
    """Yields the memory of a tensor's values, in a wrapper such as DTensor too."""
    if tensor is None:
        return
    local = local_tensor(tensor)
    tensor = local if isinstance(local, torch.Tensor) else tensor
    if tensor.layout is torch.sparse_coo:
        tensor = sparse_values(tensor)
    try:
        yield tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a layout without one
        return


class StorageMap(Generic[_Fact]):
    """Maps memory to a fact, until it is freed; given out again, it is other memory."""

    def __init__(self) -> None:
        self._facts: dict[int, tuple[Any, _Fact]] = {}

    def get(self, tensor: torch.Tensor) -> _Fact | None:
        """The fact about a tensor's memory, or None."""
        for storage in storages(tensor):
            known = self._facts.get(storage_id(storage))
            if known is not None and not known[0].expired():
                return known[1]
        return None

    def put(self, tensor: torch.Tensor, fact: _Fact) -> None:
        """Notes a fact in place of what there was."""
        for storage in storages(tensor):
            self._facts[storage_id(storage)] = _weakly(storage), fact

    def drop(self, tensor: torch.Tensor) -> None:
        """Forgets the fact about a tensor's memory."""
        for storage in storages(tensor):
            self._facts.pop(storage_id(storage), None)


def is_whole(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor has an element for all of its memory."""
    size = tensor.numel() * tensor.element_size()
    return all(storage.nbytes() == size for storage in storages(tensor))
