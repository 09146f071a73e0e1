"""The objects that a replay may change: those of the models, and of variables.

What a function reads from variables around it is put back as what the models hold is;
what else of the program it changes, such as attributes of classes, stays changed. None
of the user's code runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..guard.undo.kept_objects import (
    ATTRIBUTE,
    KEY,
    Access,
    Kept,
    KeptGenerator,
    KeptObjects,
    ObjectContents,
    access_of,
    attributes_of,
    has_attributes,
    is_array,
    pairs,
)
from ..guard.undo.random import generator_of

_NUMBERS = (bool, int, float, str)


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

    def add_around(self, roots: Iterable[tuple[str, Any]], most: int) -> None:
        """Keeps what can be reached from variables that code reads.

        Args:
            roots: The variables, each with its name.
            most: How many objects are entered.
        """
        self._is_around = True
        self.add(roots, most)

    def differences(self, first: int = 0, last: int | None = None) -> list[str]:
        """The names of numbers and generators that are not as they were.

        Args:
            first: Of what was kept from this place on.
            last: Of what was kept before this place; None for all.
        """
        return list(filter(None, map(_difference, self.kept[first:last])))

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


def _difference(kept: Kept) -> str:
    """The name of a number or a generator in it that is another one now, or ""."""
    if isinstance(kept, KeptGenerator):
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
