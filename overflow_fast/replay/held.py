"""Tensors that replayed code may read besides its batch, and where it holds them."""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..core.names import named_modules
from ..core.selection import full_name
from ..core.tensors import held_by
from ..torch_internals.tensor_internals import version_of
from .rows import Leaf

_MAX_DEPTH = 3
_MAX_ITEMS = 64  # of one container
_MAX_OBJECTS = 2000
_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_NEVER = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


class Held(Leaf):
    """A tensor that the program holds, such as an attribute of a module.

    Args:
        kind: "attribute" of a watched module, "weight" of another one, or "object".
        name: Its name, as code reads it.
        tensor: The tensor.
        look: Returns what is held there now.
    """

    def __init__(
        self, kind: str, name: str, tensor: torch.Tensor, look: Callable[[], Any]
    ) -> None:
        super().__init__(kind, name, tensor)
        self._look = look
        self._version = _version(tensor)

    def note_written(self) -> None:
        """Compares it with what it was when this was made."""
        tensor = self.tensor
        assert tensor is not None
        is_other = self._look() is not tensor
        self.is_written = is_other or _version(tensor) != self._version

    @property
    def is_carried(self) -> bool:
        """Tells whether bad values were read of it, which the step may have left."""
        return self.is_written and self.is_read


def held_leaves(
    models: Mapping[str, nn.Module], around: Mapping[str, Any]
) -> list[Held]:
    """Finds attributes of modules that are tensors, and what objects hold.

    Runs none of the user's code. Does not incur a CPU-GPU sync.

    Args:
        models: The watched models, by what their modules' names begin with.
        around: The variables that the replayed code reads, by their names.
    """
    watched = {each for model in models.values() for each in model.modules()}
    found = [
        leaf
        for prefix, model in models.items()
        for name, module in named_modules(model)
        for leaf in _attributes("attribute", full_name(prefix, name), module)
    ]
    search = _Search(watched)
    for name, value in around.items():
        found += search.walk(name, value, _constant(value), 0)
    return found


def _attributes(kind: str, name: str, owner: Any) -> Iterator[Held]:
    for key, value in list(vars(owner).items()):
        if isinstance(value, torch.Tensor):
            full = f"{name}.{key}" if name else key
            yield Held(kind, full, value, _getter(owner, key))


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def _getter(owner: Any, key: str) -> Callable[[], Any]:
    return lambda: held_by(owner, key)


class _Search:
    """Walks objects, each of them once.

    Args:
        watched: Modules that are passed over: their weights are known.
    """

    def __init__(self, watched: set[nn.Module]) -> None:
        self._watched = watched
        self._seen: dict[int, Any] = {}

    def walk(
        self, name: str, value: Any, look: Callable[[], Any], depth: int
    ) -> Iterator[Held]:
        """Yields the tensors in a value."""
        if isinstance(value, torch.Tensor):
            yield Held("object", name, value, look)
            return
        if isinstance(value, (*_PLAIN, *_NEVER)) or id(value) in self._seen:
            return
        if depth > _MAX_DEPTH or len(self._seen) >= _MAX_OBJECTS:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            yield from self._of_module(name, value)
            return
        for part, each, now in _parts(value):
            yield from self.walk(f"{name}{part}", each, now, depth + 1)

    def _of_module(self, name: str, module: nn.Module) -> Iterator[Held]:
        if module in self._watched:
            return
        tensors = [*module.named_parameters(), *module.named_buffers()]
        for key, tensor in tensors:
            yield Held("weight", f"{name}.{key}", tensor, _constant(tensor))
        for key, each in named_modules(module):
            yield from _attributes("object", f"{name}.{key}".rstrip("."), each)


def _parts(value: Any) -> Iterator[tuple[str, Any, Callable[[], Any]]]:
    """Yields what a container or an object holds: how it is read, and what it is."""
    items: list[tuple[Any, Any]]
    if isinstance(value, (list, tuple)):
        items = list(enumerate(_slice(value, slice(_MAX_ITEMS))))
    elif isinstance(value, dict):
        items = list(itertools.islice(dict.items(value), _MAX_ITEMS))
    else:
        for key in _own_names(value)[:_MAX_ITEMS]:
            yield f".{key}", held_by(value, key), _getter(value, key)
        return
    for key, each in items:
        yield f"[{key!r}]", each, _item(value, key)


def _own_names(value: Any) -> list[str]:
    """The names of an object's attributes, without those of its class."""
    own = inspect.getattr_static(value, "__dict__", None)
    names = list(vars(value)) if own is not None else []
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return names


def _item(container: Any, key: Any) -> Callable[[], Any]:
    """Returns what gets an item of a list, tuple or dict; None once it is gone."""
    if isinstance(container, dict):
        return lambda: dict.get(container, key)
    return lambda: next(iter(_slice(container, slice(key, key + 1))), None)


def _slice(values: list[Any] | tuple[Any, ...], part: slice) -> Sequence[Any]:
    """A part of a list or tuple, without a `__getitem__` of the user's."""
    if isinstance(values, list):
        return list.__getitem__(values, part)
    return tuple.__getitem__(values, part)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)
