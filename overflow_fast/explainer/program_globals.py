"""The global values of a program, shallowly: which of them a replay changes.

What a step counts in them is not put back, so that a replay may be of another count.
None of the program's code runs.
"""

from __future__ import annotations

import collections
import itertools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from ..scanner.text import is_of_program

_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (
    *(list, dict, set, collections.deque, collections.Counter),
    *(collections.OrderedDict, collections.defaultdict, bytearray),
)
_MOST = 64  # values of a container that are compared; chosen, not measured


def global_values(iterators: Iterable[Any]) -> dict[str, Any]:
    """The contents of global variables and attributes of classes, by their names.

    Args:
        iterators: Iterators and other objects without a copy.
    """
    found = {name: _outline(value) for name, value in _named(sys.modules.values())}
    counts = [each for each in iterators if type(each) is itertools.count]
    return found | {"itertools.count()": list(map(repr, counts))}


def _named(modules: Iterable[types.ModuleType]) -> Iterator[tuple[str, Any]]:
    """Yields the variables of the program's own files, and of their classes."""
    for module in list(modules):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not is_of_program(file):
            continue
        for name, value in list(vars(module).items()):
            yield name, value
            if isinstance(value, type) and value.__module__ == module.__name__:
                for key, each in list(vars(value).items()):
                    yield f"{name}.{key}", each


def _outline(value: Any) -> Any:
    """The parts that tell a value from others: a number itself, a container's items."""
    kind = type(value)
    if kind not in _CONTAINERS:
        return _outline_of(value)
    values = value.values() if isinstance(value, dict) else value
    parts = map(_outline_of, itertools.islice(values, _MOST))
    return id(value), len(value), list(parts)


def _outline_of(part: Any) -> Any:
    if type(part) in (float, complex):
        return repr(part)  # a nan is that nan
    return part if type(part) in _NUMBERS else id(part)


def changed_names(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names of what is not as it was."""
    names = before | after
    return [name for name in names if before.get(name) != after.get(name)]
