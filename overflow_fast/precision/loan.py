"""A value with other tensors for one call, whose writes reach the value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import _C
from ..tree import (
    MAX_DEPTH,
    Rebuilding,
    attributes,
    items_of,
    mapped,
    set_attribute,
    solid_base,
)


class Loan:
    """A value with other tensors for one call, whose writes reach the value.

    Caches and batches are updated by the modules that they are given to. What cannot be
    copied is lent as it is.

    Args:
        value: Any value.
        change: Returns what stands for a tensor; see `mapped()`.
        depth: The number of nested containers that are opened.

    Attributes:
        value: The value to give to the call.
    """

    def __init__(
        self, value: Any, change: Callable[[Any], Any], depth: int = MAX_DEPTH
    ) -> None:
        self._lent: list[tuple[Any, Any, _State]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor, int | None]] = []
        self._back: dict[int, Any] = {}
        if torch.compiler.is_compiling():
            self.value = mapped(value, change, depth)
            return
        made = Rebuilding(value, change, depth, (torch.Tensor,), is_strict=False)
        self.value = made.of(value)
        for original, copy in made.copied():
            self._back[id(copy)] = original
            if not issubclass(type(original), torch.Tensor):
                self._lent.append((original, copy, _state(copy)))
            elif id(original) in made.walk.of_objects:
                self._tensors.append((original, copy, _C.version_of(copy)))

    def give_back(self) -> None:
        """Writes to the value what the call has written to what it was lent."""
        for original, copy, before in self._lent:
            now = _state(copy)
            if not _is_same(now.items, before.items):
                _refill(original, [(key, self._own(each)) for key, each in now.items])
            for name, each in now.attributes:
                if not any(name == n and each is old for n, old in before.attributes):
                    set_attribute(original, name, self._own(each))
        for tensor, copy, version in self._tensors:
            is_written = copy.is_inference() or _C.version_of(copy) != version
            if is_written and not (tensor.requires_grad or copy.requires_grad):
                tensor.copy_(copy)

    def _own(self, value: Any) -> Any:
        """The original of a copy; anything else as it is."""
        return self._back.get(id(value), value)


class _State(NamedTuple):
    """The items of a list or dict, and the attributes of an object."""

    items: list[tuple[Any, Any]]
    attributes: list[tuple[str, Any]]


def _state(value: Any) -> _State:
    items: list[tuple[Any, Any]] = []
    if issubclass(type(value), list):
        items = [(None, each) for each in list.__getitem__(value, slice(None))]
    elif issubclass(type(value), dict):
        items = items_of(value)
    return _State(items, attributes(value))


def _is_same(items: list[tuple[Any, Any]], others: list[tuple[Any, Any]]) -> bool:
    return len(items) == len(others) and all(
        key is k and each is e
        for (key, each), (k, e) in zip(items, others, strict=True)
    )


def _refill(value: Any, items: list[tuple[Any, Any]]) -> None:
    base = solid_base(type(value))
    base.clear(value)
    for key, each in items:
        base.append(value, each) if base is list else base.__setitem__(value, key, each)
