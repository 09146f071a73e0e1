"""The objects that a replay may change: those of the models, and of the code around.

Besides what can be reached from the models, the program's code reads variables, its
classes' attributes and global variables, and the data of its trainer. None of the
user's code runs.
"""

from __future__ import annotations

import itertools
import operator
import queue
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..guard.undo.code_names import Names, names_in
from ..guard.undo.kept_objects import (
    ATTRIBUTE,
    CACHED,
    KEY,
    MOST,
    Access,
    Contents,
    Kept,
    KeptGenerator,
    KeptObjects,
    access_of,
    attributes_of,
    flat_of,
    has_attributes,
    is_array,
    pairs,
)
from ..guard.undo.random import generator_of
from ..scanner.text import is_of_program

_NAME = "{}"  # how a global variable is named, as a part of its module
_NUMBERS = (bool, int, float, str)
_SIZED = (queue.Queue, queue.SimpleQueue)
_METHODS = (types.FunctionType, staticmethod, classmethod, property)


class ProgramObjects(KeptObjects):
    """The contents of the objects of models and of the code around them.

    An object that holds one of the models itself, such as the program's own trainer, is
    not entered from them; from around only its data is.

    Args:
        models: The models.
    """

    def __init__(self, models: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self._models = {id(model) for model in models}
        self._is_around = False
        self._data_alone: set[int] = set()
        self._code: list[Any] = []  # functions and classes
        self._code_ids: set[int] = set()

    def add_around(self, roots: Iterable[tuple[str, Any]], most: int = MOST) -> None:
        """Keeps what code reads besides the models.

        That is what can be reached from variables, and what the program's own code that
        was met until then has in attributes of classes and in global variables.

        Args:
            roots: The variables, each with its name.
            most: How many objects are entered.
        """
        most += len(self._seen)
        self._is_around = True
        self.add(roots, most - len(self._seen))
        for value in self._code:  # it grows meanwhile
            if len(self._seen) >= most:
                return
            self.add(self._of_code(value), most - len(self._seen))

    def taken_from(self, first: int = 0) -> list[str]:
        """Those of `lost` that are, or may be, not what they were.

        Args:
            first: Of what was kept from this place on.
        """
        found = (each for each in self.kept[first:] if isinstance(each, _WithoutCopy))
        return [each.name for each in found if each.has_changed()]

    def differences(self, first: int = 0, last: int | None = None) -> list[str]:
        """The names of numbers and generators that are not as they were.

        What cannot be restored is left out: see `taken_from()`.

        Args:
            first: Of what was kept from this place on.
            last: Of what was kept before this place; None for all.
        """
        return list(filter(None, map(_difference, self.kept[first:last])))

    def _lose(self, name: str, value: Any) -> None:
        super()._lose(name, value)
        self.kept.append(_WithoutCopy(name, value))

    def _note_code(self, value: Any) -> None:
        """Notes a function, or a class with its bases, for `add_around()`."""
        for each in value.__mro__ if isinstance(value, type) else (value,):
            if id(each) not in self._code_ids:
                self._code_ids.add(id(each))
                self._code.append(each)

    def _of_object(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        parts = super()._of_object(name, value)
        if not self._holds_model(value):
            yield from parts
        elif self._is_around:
            yield from self._only_data(parts)

    def _holds_model(self, value: Any) -> bool:
        kind = type(value)
        own = pairs(attributes_of(kind).read(value)) if has_attributes(kind) else ()
        return any(id(each) in self._models for _, each in own)

    def _of_container(
        self, name: str, value: Any, access: Access
    ) -> Iterator[tuple[str, Any]]:
        parts = super()._of_container(name, value, access)
        yield from self._only_data(parts) if id(value) in self._data_alone else parts

    def _only_data(self, parts: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yields those that are data, in which no other objects will be entered."""
        for name, value in parts:
            if _is_data(value):
                self._data_alone.add(id(value))
                yield name, value

    def _of_code(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Keeps a class's data or a function's globals; yields what they hold."""
        if not _is_of_program(value):
            return
        if isinstance(value, type):
            self._keep(value.__name__, value, _CLASS)
            for key, each in _own_parts(value):
                for part in _functions_of(each):
                    yield f"{value.__name__}.{key}", part
            return
        names = names_in(value.__code__)
        yield from self._of_variables("", value.__globals__, names.all, names.set)
        for name, around in _modules_read(names.all, value.__globals__):
            yield from self._of_variables(f"{name}.", around, names.all, names.given)

    def _of_variables(
        self, prefix: str, around: dict[str, Any], names: Names, written: Names
    ) -> Iterator[tuple[str, Any]]:
        """Keeps variables of a module; yields what those of some names hold."""
        self._keep(prefix, (around, written), _GLOBALS)
        for name in names:
            each = around.get(name)
            if isinstance(each, type):
                self._note_code(each)
            for part in _functions_of(each):
                yield f"{prefix}{name}", part


def _difference(kept: Kept) -> str:
    """The name of a number or a generator in it that is another one now, or ""."""
    if isinstance(kept, KeptGenerator):
        return kept.name if kept.has_changed() else ""
    if not isinstance(kept, Contents):
        return ""
    now, before, form = kept.now(), kept.before, kept.access.form
    both: Iterable[tuple[Any, Any, Any]]
    if form in (KEY, ATTRIBUTE, _NAME):
        held = {id(key): each for key, each in pairs(now)}
        both = ((key, each, held.get(id(key))) for key, each in pairs(before))
    else:
        own = itertools.zip_longest(before, now[: len(before)])
        both = ((place, *each) for place, each in enumerate(own))
    for key, each, other in both:
        if type(each) in _NUMBERS and each is not other and each != other:
            return kept.name + form.format(key)
    return ""


class _WithoutCopy:
    """An object that cannot be put back: its place, where that can be seen."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self._value = name, value
        self._before = _place_of(value)

    def restore(self) -> None:
        """Leaves it as it is."""

    def has_changed(self) -> bool:
        """True if it is, or may be, not what it was."""
        return self._before is None or _place_of(self._value) != self._before


def _place_of(value: Any) -> Any:
    """How far an iterator is, or what a cache or queue holds; None if it is not seen.

    None of the user's code runs, and nothing is taken.
    """
    kind = type(value)
    if kind is CACHED:
        found = value.cache_info()
        return found.misses, found.currsize  # a hit changes nothing
    if kind is itertools.count:
        return repr(value)
    if kind in _SIZED:
        return value.qsize()
    if kind.__module__ == "builtins" and hasattr(kind, "__length_hint__"):
        return operator.length_hint(value)
    return None


def _is_data(value: Any) -> bool:
    """True for tensors, arrays, generators, and containers that can change."""
    if isinstance(value, torch.Tensor) or is_array(value):
        return True
    return generator_of(value) is not None or access_of(type(value)) is not None


# Code of the program's own.


def _modules_read(
    names: Names, around: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the variables of the program's own modules that a code may read."""
    waiting, seen = [("", around)], {id(around)}
    while waiting:
        prefix, held = waiting.pop()
        for name in names:
            each = held.get(name)
            if type(each) is not types.ModuleType or id(vars(each)) in seen:
                continue
            seen.add(id(vars(each)))
            if _is_programs_own(each):
                yield f"{prefix}{name}", vars(each)
                waiting.append((f"{prefix}{name}.", vars(each)))


def _is_of_program(value: Any) -> bool:
    """True for a function or a class that no installed package has."""
    if isinstance(value, type):
        name = value.__module__
        module = sys.modules.get(name) if isinstance(name, str) else None
        return module is not None and _is_programs_own(module)
    return is_of_program(value.__code__.co_filename)


def _is_programs_own(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None) or ""
    # A notebook has no file, and nor has a module that is built in.
    return bool(file or module.__name__ == "__main__") and is_of_program(file)


def _functions_of(value: Any) -> tuple[Any, ...]:
    """The functions behind a method or a cached function; else the value."""
    if isinstance(value, property):
        return value.fget, value.fset, value.fdel
    is_wrapper = isinstance(value, (staticmethod, classmethod, CACHED))
    return (value.__wrapped__ if is_wrapper else value,)


# How contents are read and replaced.


def _own_parts(kind: type) -> list[tuple[str, Any]]:
    own = type.__dict__["__dict__"].__get__(kind).items()
    return [(k, v) for k, v in own if not k.startswith(("__", "_abc_"))]


def _read_class(kind: type) -> list[Any]:
    """Reads data, and no methods: a replay's patches may stand in their place."""
    return flat_of((k, v) for k, v in _own_parts(kind) if not isinstance(v, _METHODS))


def _fill_class(kind: type, flat: list[Any]) -> None:
    before = dict(pairs(flat))
    for key, value in pairs(_read_class(kind)):
        if key not in before:
            type.__delattr__(kind, key)
        elif before[key] is value:
            del before[key]
    for key, value in before.items():
        type.__setattr__(kind, key, value)


def _read_globals(value: tuple[dict[str, Any], Names]) -> list[Any]:
    around, names = value
    return flat_of((name, around[name]) for name in names if name in around)


def _fill_globals(value: tuple[dict[str, Any], Names], flat: list[Any]) -> None:
    around, names = value
    before = dict(pairs(flat))
    for name in names:
        if name not in before:
            around.pop(name, None)
    around.update(before)


_CLASS = Access(ATTRIBUTE, _read_class, _fill_class)
_GLOBALS = Access(_NAME, _read_globals, _fill_globals)
