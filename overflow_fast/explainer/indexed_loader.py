"""Notes the indices in the data set of each batch, for reports to name a sample's."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    default_collate,
)

from ..guard.watching.inputs import WeakTensor, hold
from ..scanner.tree import tensors_in

_MOST = 8  # batches: as many forwards of a step are kept
_MOST_BYTES = 2**28  # of one tensor of each of them; chosen


class _Noted(NamedTuple):
    """The indices of a batch, and its largest tensor, by which it is known again."""

    indices: list[Any]
    largest: torch.Tensor
    held: WeakTensor

    def is_of(self, leaves: Sequence[torch.Tensor]) -> bool:
        """True if that tensor is among others, or has the same values as one."""
        own = self.held.unchanged()  # rows may have changed their places
        if own is None or not bool((own != own.flatten()[0]).any()):
            return False  # nothing tells a constant from that of another batch
        alike = [each for each in leaves if each.shape == own.shape]
        return any(each is own or _are_equal(own, each) for each in alike)


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    one = one.to(other.device, other.dtype)
    return bool(((one == other) | ((one != one) & (other != other))).all())


_LOADERS: weakref.WeakSet[IndexedLoader] = weakref.WeakSet()


class IndexedLoader:
    """A loader whose batches' indices in the data set are known to reports.

    It yields what the loader yields, in the same order and from the same random
    states, also of several workers. A report that names a sample of the batch then
    names its index in the data set. Where a `collate_fn` of your own has changed the
    order of samples, or its batch has no tensor of theirs, none is known. The last 8
    batches have their largest tensors kept until the iteration ends, up to 256 MiB.
    Does not incur a CPU-GPU sync.

    Args:
        loader: The loader, of a data set with indices. It is not changed.

    Raises:
        TypeError: If it is no `DataLoader`, its data set has no indices, or it yields
            what that has as it is (`batch_size=None`).

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.arange(6.0))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=3)
        >>> len(list(IndexedLoader(loader)))
        2
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        data = vars(loader).get("dataset") if isinstance(loader, DataLoader) else None
        if data is None or isinstance(data, IterableDataset):
            got = type(loader if data is None else data).__name__
            raise TypeError(
                f"loader must be a DataLoader of a data set with indices, got {got}"
            )
        if loader.batch_sampler is None:  # a data set may order rows as it likes
            raise TypeError("loader must make batches of samples, got batch_size=None")
        self._loader = copy.copy(loader)
        own = vars(self._loader)  # which torch lets nobody set later
        own["dataset"] = _WithIndex(data)
        own["collate_fn"] = _Collate(loader.collate_fn)
        own["_iterator"] = None  # of persistent workers
        self._noted: collections.deque[_Noted] = collections.deque(maxlen=_MOST)
        _LOADERS.add(self)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        try:
            for indices, batch in self._loader:
                with contextlib.suppress(Exception):  # it is the program's loop
                    self._note(indices, batch)
                yield batch
        finally:
            self._noted.clear()

    def _note(self, indices: Any, batch: Any) -> None:
        if not isinstance(indices, list):
            return
        rows = [e for e in tensors_in(batch) if e.dim() and len(e) == len(indices)]
        largest = max(rows, key=torch.Tensor.numel, default=None)
        if largest is None:
            return
        self._noted.append(_Noted(indices, largest, hold(largest)))
        while sum(each.largest.nbytes for each in self._noted) > _MOST_BYTES:
            self._noted.popleft()

    def indices_of(self, leaves: Sequence[torch.Tensor]) -> list[list[Any]]:
        """The indices of the noted batches that have one of some tensors."""
        return [each.indices for each in self._noted if each.is_of(leaves)]


def dataset_index(leaves: Sequence[torch.Tensor], row: int) -> int | None:
    """The index in the data set of a row of a batch; None where it is not known.

    Args:
        leaves: The tensors of the batch.
        row: The row.
    """
    found = {
        indices[row]
        for loader in list(_LOADERS)
        for indices in loader.indices_of(leaves)
    }
    if len(found) == 1:
        with contextlib.suppress(TypeError):  # such as a name
            return operator.index(found.pop())
    return None


class _WithIndex(Dataset[Any]):
    """A data set whose samples come with their indices."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __getitem__(self, index: Any) -> tuple[Any, Any]:
        return index, self._data[index]

    @property
    def __getitems__(self) -> Callable[[list[Any]], list[Any]] | None:
        """Fetches a whole batch, where the data set does."""
        fetch = getattr(self._data, "__getitems__", None)
        return fetch and functools.partial(_fetched, fetch)

    def __len__(self) -> int:
        return len(self._data)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as of a copy that is made
            raise AttributeError(name)
        return getattr(vars(self)["_data"], name)


def _fetched(fetch: Callable[[list[Any]], list[Any]], indices: list[Any]) -> list[Any]:
    samples = fetch(indices)
    are_all = len(samples) == len(indices)  # else it is not known which
    return list(
        zip(indices if are_all else [None] * len(samples), samples, strict=True)
    )


class _Collate:
    """Collates samples, and lists their indices where the batch has their order.

    Args:
        collate: Collates the samples.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, fetched: list[Any]) -> tuple[list[Any] | None, Any]:
        indices, samples = ([pair[i] for pair in fetched] for i in (0, 1))
        batch = self._collate(list(samples))
        is_known = self._collate is default_collate
        with contextlib.suppress(Exception):  # it is the program's loop
            is_known = is_known or _has_order_of(batch, samples)
        return (indices if is_known else None), batch


def _has_order_of(batch: Any, samples: list[Any]) -> bool:
    """True if a tensor of the batch has a tensor of each sample, in their order.

    They may be padded. Rows that are equal to one another tell no order.
    """
    columns = list(zip(*map(tensors_in, samples), strict=True))
    for whole in tensors_in(batch):
        if not whole.dim() or len(whole) != len(samples):
            continue
        if len(torch.unique(whole.flatten(1), dim=0)) < len(whole):
            continue
        for column in columns:
            if all(map(_begins_with, whole, column)):
                return True
    return False


def _begins_with(row: torch.Tensor, sample: torch.Tensor) -> bool:
    part = row[: len(sample)] if row.dim() and sample.dim() else row
    return part.shape == sample.shape and bool((part == sample).all())
