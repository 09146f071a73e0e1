"""Finds changes of a step, besides tensors, that no replay can put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..tree import find, path_text
from .kept_call import KeptCall

_NUMBERS = (bool, int, float, str)
_FEW = 3
_MAX_DEPTH = 3
_MAX_VALUES = 4000  # of one variable
_NUMPY = "numpy's random state"


class Effects:
    """Compares what a program holds before a replay with what it holds afterwards.

    Numbers in objects and lists, generators of random numbers, and iterators.

    Attributes of models are left out: they are put back, and often count calls.

    Args:
        calls: The calls that are replayed.
    """

    def __init__(self, calls: Iterable[KeptCall]) -> None:
        self._around: dict[str, Any] = {}
        for call in calls:
            self._around |= call.around()
        self._before = dict(self._facts())

    def changed(self) -> list[str]:
        """The names of what is not as it was; an iterator's, as it may not be."""
        before, now = self._before, dict(self._facts())
        return [
            name
            for name in before
            if isinstance(now.get(name), _Iterator) or now.get(name) != before[name]
        ]

    def _facts(self) -> Iterator[tuple[str, Any]]:
        numpys: Any = sys.modules.get("numpy.random")
        if numpys is not None:
            yield _NUMPY, _plain(numpys.get_state())
        kinds = [*_NUMBERS, torch.Tensor, nn.Module, torch.Generator, random.Random]
        kinds += [] if numpys is None else [numpys.Generator, numpys.RandomState]
        for variable, around in self._around.items():
            for path, value in find(around, tuple(kinds), _MAX_DEPTH, _MAX_VALUES):
                if not isinstance(value, (torch.Tensor, nn.Module)):
                    yield f"{variable}{path_text(path)}", _state_of(value)
        for name, value in self._around.items():
            if hasattr(type(value), "__next__"):
                yield name, _Iterator()


class _Iterator:
    """Stands for an iterator, whose place cannot be seen."""


def effects_text(names: Sequence[str]) -> str:
    """Returns, as a clause, that what has these names was not put back."""
    first = ", ".join(f"`{name}`" for name in names[:_FEW])
    return f"the step changes {first}, which could not be put back"


def _state_of(value: Any) -> Any:
    """A number, or the state of a generator, to be compared with `==`."""
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if hasattr(value, "bit_generator"):
        return _plain(value.bit_generator.state)
    return value if isinstance(value, _NUMBERS) else _plain(value.get_state())


def _plain(state: Any) -> Any:
    """A state of NumPy's as text: arrays are compared by element."""
    if isinstance(state, dict):
        return {key: _plain(each) for key, each in state.items()}
    if isinstance(state, tuple):
        return tuple(map(_plain, state))
    return state.tolist() if hasattr(state, "tolist") else state
