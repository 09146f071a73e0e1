"""A value with other tensors for one call, whose writes reach the value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import _C
from ..base.tree import (
    CALL_DEPTH,
    MAX_DEPTH,
    Rebuilding,
    attributes,
    is_declared,
    items_of,
    set_attribute,
    solid_base,
    tensors_in,
)
from ..detector.traced_walk import names_held
from ..torch_internals.tensor_internals import pytree


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
            self.value = _traced_mapped(value, change, depth)
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


def given_tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Lists the tensors that a call is given; also in code that dynamo traces."""
    if torch.compiler.is_compiling():
        return _traced_tensors((args, kwargs), CALL_DEPTH)
    return tensors_in((args, kwargs), CALL_DEPTH)


# In code that dynamo traces: it follows pytree and plain attribute access, into one
# graph, and has neither identities nor descriptors. Shared parts are copied each, and
# of objects only those of declared fields: what is written to a copy would be lost.


def _traced_tensors(value: Any, depth: int) -> list[torch.Tensor]:
    found = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif depth and is_declared(leaf):
            for name in names_held(leaf):
                found += _traced_tensors(getattr(leaf, name), depth - 1)
    return found


def _traced_mapped(value: Any, change: Callable[[Any], Any], depth: int) -> Any:
    leaves, spec = pytree.tree_flatten(value)
    new = [_traced_copy(leaf, change, depth) for leaf in leaves]
    return pytree.tree_unflatten(new, spec)


def _traced_copy(leaf: Any, change: Callable[[Any], Any], depth: int) -> Any:
    if isinstance(leaf, torch.Tensor):
        return change(leaf)
    if not is_declared(leaf) or not _traced_tensors(leaf, depth):
        return leaf
    copy = object.__new__(type(leaf))
    for name in names_held(leaf):
        made = _traced_mapped(getattr(leaf, name), change, depth - 1)
        object.__setattr__(copy, name, made)
    return copy
