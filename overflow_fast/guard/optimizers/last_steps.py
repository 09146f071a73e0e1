"""The settings of optimizers' last steps, and the versions of weights after them."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from ... import _C
from ...base.modules import stepped_by

_NUMBERS = (float, int, tuple, list)


class _LastStep(NamedTuple):
    names: tuple[str, ...]
    settings: list[tuple[Any, ...]]
    versions: list[int]
    weights: list[weakref.ref[torch.Tensor]]
    shapes: list[torch.Size]


def _are_same(references: list[Any], others: list[Any]) -> bool:
    """True if two lists hold the same objects; `==` would compare their tensors."""
    is_as_long = len(references) == len(others)
    return is_as_long and all(map(operator.is_, references, others))


def _names_of_numbers(group: Mapping[str, Any]) -> tuple[str, ...]:
    """The settings to keep: what holds a model, or an optimizer, keeps it alive."""
    return tuple(k for k, v in group.items() if type(v) in _NUMBERS and k != "params")


class LastSteps:
    """The settings of optimizers' last steps, and the versions of weights after them.

    Both may have changed when a weight is found to be non-finite: a scheduler sets the
    next learning rate, and other code writes to weights.
    """

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[Any, _LastStep] = WeakKeyDictionary()

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes in a step that was made. Does not incur a CPU-GPU sync."""
        groups, stepped = optimizer.param_groups, stepped_by(optimizer)
        versions = _C.versions_of(stepped)
        known = self._of.get(optimizer)
        weights = list(map(weakref.ref, stepped))  # one object for each that lives
        if known is not None and _are_same(weights, known.weights):
            shapes = known.shapes
        else:
            shapes = [each.shape for each in stepped]
        names = known.names if known is not None else _names_of_numbers(groups[0])
        try:
            settings = [tuple(map(group.__getitem__, names)) for group in groups]
        except KeyError:  # others than the first step had
            names = tuple(
                set.intersection(*(set(_names_of_numbers(g)) for g in groups))
            )
            settings = [tuple(map(group.__getitem__, names)) for group in groups]
        self._of[optimizer] = _LastStep(names, settings, versions, weights, shapes)

    def settings(
        self, optimizer: torch.optim.Optimizer, place: int
    ) -> Mapping[str, Any]:
        """The numbers among a group's settings in the last step, where it is known."""
        last = self._of.get(optimizer)
        if last is None or place >= len(last.settings):
            return {}
        pairs = zip(last.names, last.settings[place], strict=True)
        return {name: value for name, value in pairs if type(value) in _NUMBERS}

    def writes_since(
        self, optimizer: torch.optim.Optimizer, weight: torch.Tensor
    ) -> int:
        """The number of writes to a weight since, by its version; 0 if not known."""
        last, weights = self._of.get(optimizer), stepped_by(optimizer)
        if last is None or len(weights) != len(last.versions):
            return 0
        pairs = zip(weights, last.versions, strict=True)
        before = [version for each, version in pairs if each is weight]
        return max(0, _C.versions_of([weight])[0] - before[0]) if before else 0

    def shape_before(
        self, optimizer: torch.optim.Optimizer, weight: torch.Tensor
    ) -> torch.Size | None:
        """The shape of the weight that the last step had in the place of this one.

        None for the same weight, and where that is not known.
        """
        last, weights = self._of.get(optimizer), stepped_by(optimizer)
        if last is None or len(weights) != len(last.weights):
            return None
        places = [i for i, each in enumerate(weights) if each is weight]
        if not places or last.weights[places[0]]() is weight:
            return None
        return last.shapes[places[0]]
