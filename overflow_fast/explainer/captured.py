"""A function that a guard has held, which can be called with other data."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

from ..base.text import is_of_program, is_of_user
from ..guard.kept_calls.held_function import (
    MAX_CALLED,
    HeldFunction,
    defaults_of,
    variables_of,
)


class Captured(HeldFunction):
    """A function without arguments, which can be called with other data.

    It is called with what its variables held when it was held: a loop has given them
    the next batch since. So are the functions of its module that it calls.
    """

    @classmethod
    def of(cls, held: HeldFunction) -> Captured:
        """Makes a function that was held one that can be called again."""
        captured = cls.__new__(cls)
        vars(captured).update(vars(held))
        return captured

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """Calls the function, with values in place of its variables'."""
        is_same = all(values[name] is each for name, each in self.values.items())
        if is_same and not any(map(self._is_rebound, self.held)):
            return self.function()
        function: Any = self.plain
        args: list[Any] = []
        keywords: dict[str, Any] = {}
        if isinstance(self.function, functools.partial):
            own = self.function
            function = own.func
            given = zip(self.names, own.args, strict=True)
            args = [values.get(name, each) for name, each in given]
            keywords = {k: values.get(k, each) for k, each in own.keywords.items()}
        if self.plain is not None:
            function = self._with(self.plain, values)
        return function(*args, **keywords)

    @property
    def around(self) -> dict[str, Any]:
        called, found = self.called, self.given
        if self.plain is None:
            found["self"] = getattr(called, "__self__", called)
        for own in self.held.values():
            found |= own
        for each in [getattr(called, "__func__", called), *found.values()]:
            for owner, name, value in _all_variables(each, 0):
                if found.setdefault(name, value) is not value:
                    found[f"{owner}.{name}"] = value
        return {k: v for k, v in found.items() if k not in self.values}

    def _is_rebound(self, function: types.FunctionType) -> bool:
        """True if a variable of a function holds another object by now."""
        now = dict(variables_of(function))
        held = self.held[function]
        return any(k not in now or now[k] is not each for k, each in held.items())

    def _with(
        self,
        function: types.FunctionType,
        values: Mapping[str, Any],
        copies: dict[types.FunctionType, types.FunctionType] | None = None,
    ) -> types.FunctionType:
        """A copy of a function with what it held, but for these values."""
        copies = {} if copies is None else copies
        code, around = function.__code__, dict(function.__globals__)
        cells = {name: types.CellType() for name in code.co_freevars}
        copy = types.FunctionType(
            code, around, function.__name__, None, tuple(cells.values())
        )
        copies[function] = copy
        for name, each in zip(
            code.co_freevars, function.__closure__ or (), strict=True
        ):
            with contextlib.suppress(ValueError):  # not assigned yet
                cells[name].cell_contents = each.cell_contents
        for name, own in self.held[function].items():
            each = self._instead(name, own, values, copies)
            if name in cells:
                cells[name].cell_contents = each
            else:
                around[name] = each
        copy.__defaults__ = tuple(
            self._instead(name, each, values, copies)
            for name, each in defaults_of(function)
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        return copy

    def _instead(
        self,
        name: str,
        held: Any,
        values: Mapping[str, Any],
        copies: dict[types.FunctionType, types.FunctionType],
    ) -> Any:
        """Returns what a copy of a function reads in place of what it held."""
        if name in values and held is self.values.get(name):
            return values[name]
        if isinstance(held, types.FunctionType) and held in self.held:
            return copies[held] if held in copies else self._with(held, values, copies)
        return held


def _all_variables(function: Any, depth: int) -> Iterator[tuple[str, str, Any]]:
    """The variables of a user's function, and of functions among them.

    Each with its function's name and its own. Defaults of arguments are such, and what
    a function reads of the program's modules.
    """
    if not isinstance(function, types.FunctionType) or depth > MAX_CALLED:
        return
    code = function.__code__
    if not is_of_user(code.co_filename):
        return
    found = [*variables_of(function), *(function.__kwdefaults__ or {}).items()]
    found += defaults_of(function)
    for name, each in found:  # which grows meanwhile
        yield function.__name__, name, each
        yield from _all_variables(each, depth + 1)
        own = vars(each) if isinstance(each, types.ModuleType) else {}
        file = own.get("__file__")
        if file is not None and is_of_program(file):
            found += [(f"{name}.{key}", own.get(key)) for key in code.co_names]
