"""Looks through the objects that a function reads, without running their code."""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..core.tensors import held_by

_MAX_DEPTH = 3
_MAX_ITEMS = 64  # of one container
_MAX_VISITED = 4000  # of all values
_CLOSED = (
    *(str, bytes, int, float, complex, bool, type(None), type, types.ModuleType),
    *(types.FunctionType, types.BuiltinFunctionType),
)

# What it is called, what it is, and what returns what is there now.
Found = tuple[str, Any, Callable[[], Any]]


def leaves_of(around: Mapping[str, Any], kinds: tuple[type, ...]) -> Iterator[Found]:
    """Yields what variables hold of some types, each object once, the nearest first.

    Args:
        around: The variables, by their names.
        kinds: The types. What is of one of them is not looked into.
    """
    seen: dict[int, Any] = {}
    near = [(name, value, constant(value)) for name, value in around.items()]
    num_left = _MAX_VISITED
    for _ in range(_MAX_DEPTH + 1):
        far: list[Found] = []
        for name, value, look in near:
            num_left -= 1
            if isinstance(value, kinds):
                yield name, value, look
            elif not isinstance(value, _CLOSED) and id(value) not in seen:
                seen[id(value)] = value
                if len(far) < num_left:
                    far += [(f"{name}{part}", *rest) for part, *rest in _parts(value)]
        near = far[: max(0, num_left)]


def constant(value: Any) -> Callable[[], Any]:
    """Returns what returns a value."""
    return lambda: value


def getter(owner: Any, key: str) -> Callable[[], Any]:
    """Returns what returns an attribute that an object holds."""
    return lambda: held_by(owner, key)


def _parts(value: Any) -> Iterator[tuple[str, Any, Callable[[], Any]]]:
    """Yields what a container or an object holds: how it is read, and what it is."""
    items: list[tuple[Any, Any]]
    if isinstance(value, (list, tuple)):
        items = list(enumerate(_slice(value, slice(_MAX_ITEMS))))
    elif isinstance(value, dict):
        items = list(itertools.islice(dict.items(value), _MAX_ITEMS))
    else:
        for key, each in itertools.islice(_attributes(value), _MAX_ITEMS):
            yield f".{key}", each, getter(value, key)
        return
    for key, each in items:
        yield f"[{key!r}]", each, _item(value, key)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields an object's attributes, without those of its class."""
    if inspect.getattr_static(value, "__dict__", None) is not None:
        yield from list(vars(value).items())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            yield name, held_by(value, name)


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
