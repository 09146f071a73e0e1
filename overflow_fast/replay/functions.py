"""The variables that a function takes from around it: its batch."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

_MAX_DEPTH = 3


class Captured:
    """A function without arguments, which can be called with other data.

    Args:
        function: The function. What it reads from variables around it, or has as
            arguments of `functools.partial`, is its batch if there are tensors in it.

    Attributes:
        values: The batch: the values of those variables, by their names.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.values: dict[str, Any] = {}
        plain = function
        if isinstance(function, functools.partial):
            for i, each in enumerate(function.args):
                self._add(str(i), each)
            for key, each in function.keywords.items():
                self._add(key, each)
            plain = function.func
        self._plain = plain if isinstance(plain, types.FunctionType) else None
        if self._plain is not None:
            self._add_variables(self._plain)

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """Calls the function, with values in place of its variables'."""
        if all(values[name] is each for name, each in self.values.items()):
            return self._function()
        function: Any = self._plain
        args: list[Any] = []
        keywords: dict[str, Any] = {}
        if isinstance(self._function, functools.partial):
            own = self._function
            function = own.func
            args = [values.get(str(i), each) for i, each in enumerate(own.args)]
            keywords = {k: values.get(k, each) for k, each in own.keywords.items()}
        if self._plain is not None:
            function = self._with(self._plain, values)
        return function(*args, **keywords)

    def _add_variables(self, function: types.FunctionType) -> None:
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            try:
                self._add(name, cell.cell_contents)
            except ValueError:  # not assigned yet
                continue
        for name in function.__code__.co_names:
            if name in function.__globals__:
                self._add(name, function.__globals__[name])
        count = len(function.__defaults__ or ())
        last = function.__code__.co_varnames[: function.__code__.co_argcount]
        for name, each in zip(
            last[-count:] if count else (), function.__defaults__ or (), strict=False
        ):
            self._add(name, each)

    def _add(self, name: str, value: Any) -> None:
        if name not in self.values and _holds_tensors(value):
            self.values[name] = value

    def _with(
        self, function: types.FunctionType, values: Mapping[str, Any]
    ) -> types.FunctionType:
        code = function.__code__
        cells = tuple(
            types.CellType(values[name]) if name in values else cell
            for name, cell in zip(
                code.co_freevars, function.__closure__ or (), strict=True
            )
        )
        around = {**function.__globals__, **values}
        copy = types.FunctionType(code, around, function.__name__, None, cells)
        last = code.co_varnames[: code.co_argcount]
        defaults = function.__defaults__ or ()
        names = last[len(last) - len(defaults) :]
        copy.__defaults__ = tuple(
            values.get(name, each) for name, each in zip(names, defaults, strict=True)
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        return copy


def _holds_tensors(value: Any, depth: int = 0) -> bool:
    if isinstance(value, (nn.Module, nn.Parameter)):
        return False
    if isinstance(value, torch.Tensor):
        return True
    if depth == _MAX_DEPTH:
        return False
    if isinstance(value, Mapping):
        return any(_holds_tensors(each, depth + 1) for each in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_tensors(each, depth + 1) for each in value)
    return False
