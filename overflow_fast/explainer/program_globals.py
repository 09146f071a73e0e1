"""The global values of a program, shallowly: which of them a replay changes.

What a step counts in them is not put back, so that a replay may be of another count.
None of the program's code runs.
"""

from __future__ import annotations

import collections
import itertools
import types
from collections.abc import Iterable, Iterator
from typing import Any

from ..base.source_files import modules_of_program

_Name = tuple[str, str]  # its module, or else where it is, and its own
Values = dict[_Name, Any]
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (
    *(list, dict, set, collections.deque, collections.Counter),
    *(collections.OrderedDict, collections.defaultdict, bytearray),
)
_MOST = 64  # values of a container that are compared; chosen, not measured


def global_values(iterators: Iterable[Any] = ()) -> Values:
    """The contents of global variables and attributes of classes, by their names.

    Args:
        iterators: Iterators that the replayed code reads.
    """
    found = {name: _outline(value) for name, value in _named(modules_of_program())}
    counts = [each for each in iterators if type(each) is itertools.count]
    return found | {("", "itertools.count()"): list(map(repr, counts))}


def _named(modules: Iterable[types.ModuleType]) -> Iterator[tuple[_Name, Any]]:
    """Yields the variables of the program's own files, and of their classes."""
    for module in modules:
        own = vars(module)
        place = str(own.get("__name__"))
        for name, value in list(own.items()):
            yield (place, name), value
            if isinstance(value, type) and value.__module__ == place:
                for key, each in list(vars(value).items()):
                    yield (place, f"{value.__name__}.{key}"), each


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


def changed_names(before: Values, after: Values) -> list[str]:
    """The names of what is not as it was."""
    names = before | after
    changed = (name for name in names if before.get(name) != after.get(name))
    return list(dict.fromkeys(name for _, name in changed if not _is_machinery(name)))


def _is_machinery(name: str) -> bool:
    """True for what Python itself writes, as `__warningregistry__`, and a compiler.

    torch.compile writes `__compiled_fn_3` and the like, and takes them away when the
    collector frees what it has compiled, at any moment.
    """
    return name.rpartition(".")[2].startswith("__")
