"""The objects that a replay may change: those of the models, and of variables.

What a function reads from variables around it is put back as what the models hold is;
what else of the program it changes stays changed: what other functions hold, attributes
of classes, context variables. None of the user's code runs.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..guard.undo.attributes import BARE
from ..guard.undo.contents import (
    ATTRIBUTE,
    ATTRIBUTES,
    KEY,
    GeneratorContents,
    Kept,
    ObjectContents,
    access_of,
    is_array,
    pairs,
)
from ..guard.undo.kept_objects import ATOMS, KeptObjects
from ..guard.undo.random import generator_of
from ..torch_internals.module_internals import BUFFERS, MODULES, PARAMETERS

_NUMBERS = (bool, int, float, str)
# Of an array that is copied, which takes 0.05 s or more; of objects, which take 1.2 s,
# and of those in the variables of a function, 0.05 s. What is larger, or lies behind
# these, nearest first, stays as a replay leaves it.
_MAX_BYTES = 2**28
MOST_OF_MODELS = 100_000
_MOST_AROUND = 4000
_METHODS = (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)
_TABLES = (PARAMETERS, BUFFERS, MODULES)


class ProgramObjects(KeptObjects):
    """The contents of the objects of models and of the code around them.

    An object that holds one of the models itself, such as the program's own trainer, is
    not entered from them; from around only its data is.

    Args:
        models: The models.

    Attributes:
        iterators: Those that were met. What is taken from them is not given back.
    """

    def __init__(self, models: Iterable[nn.Module] = ()) -> None:
        super().__init__(most_bytes=_MAX_BYTES)
        self._models = {id(model) for model in models}
        self._is_around = False
        self._data_alone: set[int] = set()
        self.iterators: list[Any] = []

    def add_around(self, roots: Iterable[tuple[str, Any]]) -> None:
        """Keeps what can be reached from variables that code reads.

        Args:
            roots: The variables, each with its name.
        """
        self._is_around = True
        self.add(roots, _MOST_AROUND)

    def differences(self, first: int = 0, last: int | None = None) -> list[str]:
        """The names of numbers and generators that are not as they were.

        Args:
            first: Of what was kept from this place on.
            last: Of what was kept before this place; None for all.
        """
        return list(filter(None, map(_difference, self.kept[first:last])))

    def _visit(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, nn.Module):
            yield from self._of_module(name, value)
        elif isinstance(value, _METHODS):
            yield name, value.__self__
        elif isinstance(value, functools.partial):
            yield from ((name, e) for e in (value.func, value.args, value.keywords))
        elif hasattr(type(value), "__next__") and not self._opens(value):
            self.iterators.append(value)
        else:
            yield from super()._visit(name, value)

    def _of_module(self, name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
        """Keeps a module with its tables of parameters, hooks and such."""
        prefix = f"{name}." if name else ""
        own = dict(pairs(self._keep(name, module, ATTRIBUTES)))
        if isinstance(module, torch.jit.ScriptModule):  # TorchScript has its tensors
            for tensors in (module.named_parameters, module.named_buffers):
                for key, each in tensors(recurse=False):
                    yield f"{prefix}{key}", each
        for key, value in own.items():
            if type(value) in ATOMS:
                continue
            if key not in BARE:
                yield f"{prefix}{key}", value
            elif (access := access_of(type(value))) is not None:
                self._keep(f"{prefix}{key}", value, access)
                if key in _TABLES:
                    for inner, each in list(value.items()):
                        yield f"{prefix}{inner}", each

    def _of_object(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        parts = super()._of_object(name, value)
        if not self._holds_model(value):
            yield from parts
        elif self._is_around:
            yield from self._only_data(parts)

    def _holds_model(self, value: Any) -> bool:
        own = pairs(ATTRIBUTES.read(value))
        return any(id(each) in self._models for _, each in own)

    def _of_container(
        self, name: str, value: Any, kept: ObjectContents
    ) -> Iterator[tuple[str, Any]]:
        parts = super()._of_container(name, value, kept)
        yield from self._only_data(parts) if id(value) in self._data_alone else parts

    def _only_data(self, parts: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yields those that are data, in which no other objects will be entered."""
        for name, value in parts:
            if _is_data(value):
                self._data_alone.add(id(value))
                yield name, value


def _difference(kept: Kept) -> str:
    """The name of a number or a generator in it that is another one now, or ""."""
    if isinstance(kept, GeneratorContents):
        return kept.name if kept.has_changed() else ""
    if not isinstance(kept, ObjectContents):
        return ""
    now, before, form = kept.now(), kept.before, kept.access.form
    both: Iterable[tuple[Any, Any, Any]]
    if form in (KEY, ATTRIBUTE):
        held = {id(key): each for key, each in pairs(now)}
        both = ((key, each, held.get(id(key))) for key, each in pairs(before))
    else:
        own = itertools.zip_longest(before, now[: len(before)])
        both = ((place, *each) for place, each in enumerate(own))
    for key, each, other in both:
        if type(each) in _NUMBERS and each is not other and each != other:
            return kept.name + form.format(key)
    return ""


def _is_data(value: Any) -> bool:
    """True for tensors, arrays, generators, and containers that can change."""
    if isinstance(value, torch.Tensor) or is_array(value):
        return True
    return generator_of(value) is not None or access_of(type(value)) is not None
