"""A function that is kept with the variables that it takes from around it.

1. `HeldFunction` holds what the variables of the function, and of those of its module
   that it calls, hold now. Those with tensors are its batch: `values`.
2. It is called with values in place of the batch's: a copy of the function has these,
   and what else was held. The user's own functions and variables are never written to.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from ...base.source_files import is_of_program, is_of_user
from ...base.tree import (
    MAX_DEPTH,
    OBJECTS_OF_STEP,
    Path,
    attributes,
    find,
    is_container,
    opaque,
    tensors,
    tensors_in,
)
from ..undo.contents import Kept, contents_of
from ..undo.kept_objects import is_state
from ..undo.random import kinds_of_generators
from .code_names import global_names, sets_variables

# Functions deep; chosen, not measured. A function that is called deeper reads what its
# variables hold in the replay: the next batch, where the loop has gone on.
MAX_CALLED = 3
# Of an object that may be a batch. One with more is taken for a part of the program: a
# replay uses it as it is, and does not look for the bad sample in it.
_MAX_VALUES = 256
_OF_PROGRAM = (torch.Tensor, nn.Module, Optimizer, Dataset, DataLoader)
_BY_PLACE = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


class HeldFunction:
    """A function without arguments, with what its variables hold now.

    A loop gives them the next batch before the step is judged. The variables of the
    functions of its module that it calls are held, too. It can be called again with
    what they held, or with other data.

    Args:
        function: The function. What it reads from variables around it, or has as
            arguments of `functools.partial`, is its batch if there are tensors in it.
        seen: The `id` of each object that variables of a code held when it was held
            last, to which it adds its own.

    Attributes:
        function: The same.
        called: What is called in the end: of a partial, what it is of.
        names: The names of a partial's positional arguments.
        plain: The function that `called` is, or None where it is another object.
        held: The variables of each function, by their names.
        values: The batch: the values of those variables, by their names.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        seen: MutableMapping[types.CodeType, dict[str, int]] | None = None,
    ) -> None:
        self.function = function
        self.values: dict[str, Any] = {}
        self._objects: dict[str, Any] = {}
        self._modules: dict[str, nn.Module] = {}
        plain = function
        self.names: list[str] = []
        if isinstance(function, functools.partial):
            plain = function.func
            self.names = argument_names(plain, len(function.args))
            for name, each in self.given.items():
                self._add(name, each)
        self.called = plain
        self.plain = plain if isinstance(plain, types.FunctionType) else None
        self.held: dict[types.FunctionType, dict[str, Any]] = {}
        if self.plain is not None:
            self._hold(self.plain, 0)
            for each in self.held.values():
                for name, value in each.items():
                    self._add(name, value)
            for name, value in defaults_of(self.plain):
                self._add(name, value)
        before = dict[str, int]()
        if seen is not None and self.plain is not None:
            code = self.plain.__code__
            before = seen.get(code, before)
            seen[code] = {name: id(each) for name, each in self._objects.items()}
        self._add_objects(before)

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of a partial, by their names."""
        own = self.function
        if not isinstance(own, functools.partial):
            return {}
        return {**dict(zip(self.names, own.args, strict=True)), **own.keywords}

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """Calls the function, with values in place of its variables'."""
        is_same = all(values[name] is each for name, each in self.values.items())
        is_set = any(sets_variables(each.__code__) for each in self.held)
        if is_same and not (is_set or any(map(self._is_rebound, self.held))):
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

    def generators(self) -> list[Kept]:
        """The states of the generators of random numbers that its variables hold.

        Also of those that are attributes of objects among them.
        """
        kinds, found = kinds_of_generators(), dict[int, Kept | None]()
        for name, each in self._parts:
            if issubclass(type(each), kinds) and id(each) not in found:
                found[id(each)] = contents_of(name, each)
        return list(filter(None, found.values()))

    def modules(self) -> dict[str, nn.Module]:
        """The modules that its variables hold, or objects among them, by name."""
        held = {n: each for n, each in self._parts if isinstance(each, nn.Module)}
        return held | self._modules

    @functools.cached_property
    def _parts(self) -> list[tuple[str, Any]]:
        """The objects that its variables hold, and their attributes."""
        own = self._objects if self.plain else {**self._objects, "self": self.called}
        found = list[tuple[str, Any]]()
        for name, held in own.items():
            value = held.__self__ if isinstance(held, types.MethodType) else held
            found.append((name, value))
            parts = attributes(value) if is_state(value) else ()
            found += ((f"{name}.{key}", part) for key, part in parts)
        return found

    def _hold(self, function: types.FunctionType, depth: int) -> None:
        """Holds the variables of a function, and of those of its module among them."""
        held = self.held[function] = dict(variables_of(function))
        if depth == MAX_CALLED:
            return
        for each in held.values():
            if isinstance(each, types.FunctionType) and each not in self.held:
                if each.__globals__ is not function.__globals__:
                    continue
                self._hold(each, depth + 1)

    def _add(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            self._modules.setdefault(name, value)
        if name in self.values or isinstance(value, (nn.Module, nn.Parameter)):
            return
        if not is_container(value):
            self._objects.setdefault(name, value)
        elif any(not isinstance(t, nn.Parameter) for t in given_in(value)):
            self.values[name] = value

    def _add_objects(self, before: Mapping[str, int]) -> None:
        """Adds objects that hold data alone: as many rows as the rest of the batch.

        Or, as a batch of graphs does, tensors of any size, if each call has another
        such object.
        """
        sizes = _sizes(given_in(self.values))
        for name, value in self._objects.items():
            held = [tensor for _, tensor in data_in(value)]
            own, is_new = _sizes(held), before.get(name, id(value)) != id(value)
            is_new &= bool(held) and not any(each.requires_grad for each in held)
            if is_new or (len(own) == 1 and (not sizes or own == sizes)):
                self.values[name] = value


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


def argument_names(function: Callable[..., Any], count: int) -> list[str]:
    """The names of the first parameters; their places where they have none."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in _BY_PLACE][:count]
    return names + [f"input[{i}]" for i in range(len(names), count)]


def variables_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables from around a function that it can read, and what they hold."""
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    around = function.__globals__
    for name in global_names(function.__code__):
        if name in around:
            yield name, around[name]


def defaults_of(function: types.FunctionType) -> list[tuple[str, Any]]:
    """The defaults of a function's positional arguments, with the names of these."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return list(zip(names, values, strict=True))


def data_in(value: Any) -> list[tuple[Path, torch.Tensor]]:
    """Lists the tensors of a container, or of an object that holds data alone.

    That is no object that leads to modules, optimizers or datasets, or to many values.
    """
    if is_container(value):
        return tensors(value)
    found = find(value, _OF_PROGRAM, most=_MAX_VALUES)
    is_data = all(type(each) is torch.Tensor for _, each in found)
    return found if found and is_data and not opaque(value, most=_MAX_VALUES) else []


def given_in(value: Any, depth: int = MAX_DEPTH) -> list[torch.Tensor]:
    """Lists the tensors of what a call is given; a few thousand objects are opened."""
    return tensors_in(value, depth, OBJECTS_OF_STEP)


def _sizes(tensors: list[torch.Tensor]) -> set[int]:
    """The sizes of the first dimension of tensors that have one."""
    return {tensor.size(0) for tensor in tensors if tensor.dim()}
