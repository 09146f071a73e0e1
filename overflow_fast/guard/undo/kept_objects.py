"""The objects that can be reached from some: what they hold, kept by identity.

Entered are containers, arrays, and objects of the program's own classes, by their
attributes, which `tree` reads. Not entered is what is no state of a model: functions,
modules, objects of torch (but optimizers, distributions and such), of the standard
library (but containers and namespaces), of trainers and of this package.
"""

from __future__ import annotations

import collections
import enum
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ...base.tensors import PLAIN
from ...base.tree import layout
from ..libraries import PACKAGES
from .contents import (
    ATTRIBUTES,
    KEY,
    Access,
    ArrayContents,
    Kept,
    ObjectContents,
    contents_of,
    is_numpys,
    num_bytes_of,
    num_items_of,
    pairs,
    restore_all,
)

ATOMS = frozenset(
    {
        *(bool, int, float, complex, str, bytes, type(None), type, range, slice),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
        *(types.ModuleType, type(Ellipsis)),
    }
)
_CLOSED = {
    *("overflow_fast", "torch", "torchgen", "functorch", "triton", "numpy"),
    *PACKAGES,
}
# Of torch and the standard library: objects that hold state of a model, and no more.
_OPEN_PARTS = ("torch.optim", "torch.amp", "torch.distributions", "torch.quasirandom")
_OPEN_PACKAGES = {"collections", "types", "argparse"}


def is_state(value: Any) -> bool:
    """True for an object, but no module, whose attributes may be state of a model."""
    if isinstance(value, nn.Module):
        return False
    module = type(value).__module__
    package = module.partition(".")[0] if isinstance(module, str) else ""
    if package in _CLOSED:
        return isinstance(module, str) and module.startswith(_OPEN_PARTS)
    return package in _OPEN_PACKAGES or package not in sys.stdlib_module_names


class KeptObjects:
    """The contents of mutable objects, by identity, to be restored in place.

    Tensors, which other code keeps, are only listed.

    Args:
        opens: Returns True for an object whose attributes count.
        most_bytes: The size of the largest array that is copied; None for any.
        most_items: The size of the largest container that is read; None for any.

    Attributes:
        kept: What is kept, in the order in which it was met.
        tensors: The tensors that were met, by id, with the name of the first place.
        is_whole: All that can be reached was entered, and nothing was too large.
    """

    def __init__(
        self,
        opens: Callable[[Any], bool] = is_state,
        most_bytes: int | None = None,
        most_items: int | None = None,
    ) -> None:
        self._opens = opens
        self._most_bytes, self._most_items = most_bytes, most_items
        self._seen: dict[int, Any] = {}
        self.kept: list[Kept] = []
        self.tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self.is_whole = True

    def add(self, roots: Iterable[tuple[str, Any]], most: int | None = None) -> None:
        """Keeps what can be reached from objects that are not kept yet, nearest first.

        Args:
            roots: The objects, each with its name.
            most: How many objects are entered; None for all.
        """
        waiting, last = collections.deque(roots), len(self._seen) + (most or 0)
        while waiting:
            if most is not None and len(self._seen) >= last:
                self.is_whole = False
                break
            name, value = waiting.popleft()
            if type(value) not in ATOMS and id(value) not in self._seen:
                self._seen[id(value)] = value
                waiting.extend(self._visit(name, value))

    @property
    def num_items(self) -> int:
        """The number of values that all containers hold together."""
        return sum(len(e.before) for e in self.kept if isinstance(e, ObjectContents))

    def attributes(self, value: Any) -> dict[str, Any]:
        """The attributes that an object had; none where that is not known."""
        contents = (each for each in self.kept if isinstance(each, ObjectContents))
        found = (each for each in contents if each.are_attributes_of(value))
        return next((dict(pairs(each.before)) for each in found), {})

    def restore(self) -> list[tuple[str, str]]:
        """Makes all objects hold what they held.

        Returns:
            What stays changed, and why.
        """
        return restore_all(self.kept)

    def _keep(self, name: str, value: Any, access: Access) -> list[Any]:
        contents = ObjectContents(name, value, access)
        self.kept.append(contents)
        return contents.before

    def _visit(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Keeps one object; yields those that it holds, with their names."""
        kind = type(value)
        if issubclass(kind, (type, enum.Enum)):
            return
        if self._is_large(value):
            self.is_whole = False
            return
        if issubclass(kind, torch.Tensor):
            self.tensors[id(value)] = name, value
        else:
            yield from self._items(name, value)
        if _has_attributes(kind) and (kind in PLAIN or self._opens(value)):
            yield from self._of_object(name, value)

    def _items(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, (tuple, frozenset)):
            items: Any = tuple if isinstance(value, tuple) else frozenset
            yield from _indexed(name, items.__iter__(value))
            return
        kept = contents_of(name, value)
        if kept is None:
            return
        self.kept.append(kept)
        if isinstance(kept, ArrayContents) and is_numpys(value):
            yield from _indexed(name, value.flat if value.dtype.hasobject else ())
        elif isinstance(kept, ObjectContents):
            yield from self._of_container(name, value, kept)

    def _of_container(
        self, name: str, value: Any, kept: ObjectContents
    ) -> Iterator[tuple[str, Any]]:
        if kept.access.form != KEY:
            yield from _indexed(name, kept.before)
            return
        for key, each in pairs(kept.before):
            yield f"{name}[{key!r}]" if type(key) in ATOMS else name, each
            yield name, key

    def _of_object(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        own = pairs(self._keep(name, value, ATTRIBUTES))
        yield from ((f"{name}.{key}", e) for key, e in own if type(e) not in ATOMS)

    def _is_large(self, value: Any) -> bool:
        """True for what is not even read: that takes as long as a copy."""
        bytes, items = self._most_bytes, self._most_items
        if bytes is not None and num_bytes_of(value) > bytes:
            return True
        return items is not None and num_items_of(value) > items


def _has_attributes(kind: type) -> bool:
    """True for a type whose objects have attributes or slots."""
    known = layout(kind)
    return known.has_dict or bool(known.slots)


def _indexed(name: str, items: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for place, each in enumerate(items):
        if type(each) not in ATOMS:
            yield f"{name}[{place}]", each
