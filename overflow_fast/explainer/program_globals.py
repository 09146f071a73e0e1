"""The global values of a program, shallowly: which of them a replay changes.

What a step counts in them is not put back, so that a replay may be of another count.
None of the program's code runs.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import sys
import types
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

from ..base.text import is_of_program

_Name = tuple[str, str]  # its module, or else where it is, and its own
Values = dict[_Name, Any]
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (
    *(list, dict, set, collections.deque, collections.Counter),
    *(collections.OrderedDict, collections.defaultdict, bytearray),
)
# Names of modules of packages and of Python, as most are: each is looked at once.
_installed: set[str] = set()
_folders: dict[str, bool] = {}  # whether their files are the program's
_MOST = 64  # values of a container that are compared; chosen, not measured


def global_values(
    iterators: Iterable[Any] = (), classes: Iterable[type] = ()
) -> Values:
    """The contents of global variables and attributes of classes, by their names.

    Args:
        iterators: Iterators that the replayed code reads.
        classes: Classes that may be no module's, with variables that their methods use.
    """
    named = itertools.chain(_named(_own_modules()), _of_classes(classes))
    found = {name: _outline(value) for name, value in named}
    counts = [each for each in iterators if type(each) is itertools.count]
    return found | {("", "itertools.count()"): list(map(repr, counts))}


def _own_modules() -> list[types.ModuleType]:
    """The modules of the program's own files."""
    found = [each for each in list(sys.modules.items()) if each[0] not in _installed]
    modules = []
    for name, module in found:
        if not isinstance(module, types.ModuleType):
            continue
        file = vars(module).get("__file__")  # what is imported at its first use is not
        folder = os.path.dirname(file) or file if isinstance(file, str) else ""
        if isinstance(file, str) and folder not in _folders:
            _folders[folder] = is_of_program(file)
        if isinstance(file, str) and not _folders[folder]:
            _installed.add(name)
        elif isinstance(file, str) or vars(module).get("__name__") == "__main__":
            modules.append(module)
    return modules


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


def _of_classes(classes: Iterable[type]) -> Iterator[tuple[_Name, Any]]:
    for each in classes:
        for key, value in list(vars(each).items()):
            yield (each.__module__, f"{each.__name__}.{key}"), value
            if not isinstance(value, FunctionType):
                continue
            cells = value.__closure__ or ()
            for name, cell in zip(value.__code__.co_freevars, cells, strict=True):
                with contextlib.suppress(ValueError):  # not assigned yet
                    yield (f"{each.__module__}.{key}", name), cell.cell_contents


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
