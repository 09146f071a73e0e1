"""The variables that a function takes from around it: its batch, and the others."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from .. import _C
from ..core.modules import modules_in, named_buffers, named_modules, named_parameters
from ..core.selection import full_name
from ..state.objects import global_names
from ..tree import (
    Path,
    at,
    find,
    held,
    is_container,
    opaque,
    path_text,
    tensors,
    tensors_in,
)
from .op_trace import Leaf
from .places import is_of_user

_MAX_DEPTH = 3
_MAX_VALUES = 256  # of an object that may be a batch
_OF_PROGRAM = (torch.Tensor, nn.Module, Optimizer, Dataset, DataLoader)
_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Captured:
    """A function without arguments, which can be called with other data.

    It is called with what its variables held when this was made: a loop has given them
    the next batch since. So are the functions of its module that it calls.

    Args:
        function: The function. What it reads from variables around it, or has as
            arguments of `functools.partial`, is its batch if there are tensors in it.

    Attributes:
        values: The batch: the values of those variables, by their names.
        around: All variables that it reads, by their names.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.values: dict[str, Any] = {}
        self._objects: dict[str, Any] = {}
        plain = function
        self._names: list[str] = []  # of the positional arguments of a partial
        if isinstance(function, functools.partial):
            plain = function.func
            self._names = argument_names(plain, len(function.args))
            for name, each in zip(self._names, function.args, strict=True):
                self._add(name, each)
            for key, each in function.keywords.items():
                self._add(key, each)
        self._called = plain
        self._plain = plain if isinstance(plain, types.FunctionType) else None
        self._held: dict[types.FunctionType, dict[str, Any]] = {}
        if self._plain is not None:
            self._hold(self._plain, 0)
            for each in self._held.values():
                for name, value in each.items():
                    self._add(name, value)
            self._add_defaults(self._plain)
        self._add_objects()

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """Calls the function, with values in place of its variables'."""
        is_same = all(values[name] is each for name, each in self.values.items())
        if is_same and not any(map(self._is_rebound, self._held)):
            return self._function()
        function: Any = self._plain
        args: list[Any] = []
        keywords: dict[str, Any] = {}
        if isinstance(self._function, functools.partial):
            own = self._function
            function = own.func
            given = zip(self._names, own.args, strict=True)
            args = [values.get(name, each) for name, each in given]
            keywords = {k: values.get(k, each) for k, each in own.keywords.items()}
        if self._plain is not None:
            function = self._with(self._plain, values)
        return function(*args, **keywords)

    @property
    def around(self) -> dict[str, Any]:
        called, found = self._called, dict[str, Any]()
        if isinstance(self._function, functools.partial):
            found |= zip(self._names, self._function.args, strict=True)
            found |= self._function.keywords
        if self._plain is None:
            found["self"] = getattr(called, "__self__", called)
        for own in self._held.values():
            found |= own
        for each in [getattr(called, "__func__", called), *found.values()]:
            found = dict(_all_variables(each, 0)) | found
        return {k: v for k, v in found.items() if k not in self.values}

    def _hold(self, function: types.FunctionType, depth: int) -> None:
        """Holds the variables of a function, and of those of its module among them."""
        held = self._held[function] = dict(_variables(function))
        if depth == _MAX_DEPTH:
            return
        for each in held.values():
            if isinstance(each, types.FunctionType) and each not in self._held:
                if each.__globals__ is not function.__globals__:
                    continue
                self._hold(each, depth + 1)

    def _is_rebound(self, function: types.FunctionType) -> bool:
        """True if a variable of a function holds another object by now."""
        now = dict(_variables(function))
        held = self._held[function]
        return any(k not in now or now[k] is not each for k, each in held.items())

    def _add_defaults(self, function: types.FunctionType) -> None:
        count = len(function.__defaults__ or ())
        last = function.__code__.co_varnames[: function.__code__.co_argcount]
        for name, each in zip(
            last[-count:] if count else (), function.__defaults__ or (), strict=False
        ):
            self._add(name, each)

    def _add(self, name: str, value: Any) -> None:
        if name in self.values or isinstance(value, (nn.Module, nn.Parameter)):
            return
        if not is_container(value):
            self._objects.setdefault(name, value)
        elif any(not isinstance(t, nn.Parameter) for t in tensors_in(value)):
            self.values[name] = value

    def _add_objects(self) -> None:
        """Adds objects that hold data alone: as many rows as the rest of the batch."""
        sizes = _sizes(tensors_in(self.values))
        for name, value in self._objects.items():
            own = _sizes([tensor for _, tensor in data_in(value)])
            if len(own) == 1 and (not sizes or own == sizes):
                self.values[name] = value

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
        for name, own in self._held[function].items():
            each = self._instead(name, own, values, copies)
            if name in cells:
                cells[name].cell_contents = each
            else:
                around[name] = each
        last = code.co_varnames[: code.co_argcount]
        defaults = function.__defaults__ or ()
        names = last[len(last) - len(defaults) :]
        copy.__defaults__ = tuple(
            self._instead(name, each, values, copies)
            for name, each in zip(names, defaults, strict=True)
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
        if isinstance(held, types.FunctionType) and held in self._held:
            return copies[held] if held in copies else self._with(held, values, copies)
        return held


def argument_names(function: Callable[..., Any], count: int) -> list[str]:
    """The names of the first parameters; their places where they have none."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind not in _MANY][:count]
    return names + [f"input[{i}]" for i in range(len(names), count)]


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
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


def _all_variables(function: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """The variables of a user's function, and of functions among them."""
    if not isinstance(function, types.FunctionType) or depth > _MAX_DEPTH:
        return
    if not is_of_user(function.__code__.co_filename):
        return
    for name, each in _variables(function):
        yield name, each
        yield from _all_variables(each, depth + 1)


def data_in(value: Any) -> list[tuple[Path, torch.Tensor]]:
    """Lists the tensors of a container, or of an object that holds data alone.

    That is no object that leads to modules, optimizers or datasets, or to many values.
    """
    if is_container(value):
        return tensors(value)
    found = find(value, _OF_PROGRAM, most=_MAX_VALUES)
    is_data = all(type(each) is torch.Tensor for _, each in found)
    return found if found and is_data and not opaque(value, most=_MAX_VALUES) else []


def _sizes(tensors: list[torch.Tensor]) -> set[int]:
    """The sizes of the first dimension of tensors that have one."""
    return {tensor.size(0) for tensor in tensors if tensor.dim()}


# Tensors that replayed code may read besides its batch, and where it holds them.


_OWN = set(vars(nn.Module()))


class HeldTensor(Leaf):
    """A tensor that the program holds, such as an attribute of a module.

    Args:
        kind: "attribute" of a watched module, "weight" of another one, or "object".
        name: Its name, as code reads it.
        tensor: The tensor.
        look: Returns what is held there now.
    """

    def __init__(
        self, kind: str, name: str, tensor: torch.Tensor, look: Callable[[], Any]
    ) -> None:
        super().__init__(kind, name, tensor)
        self._look = look
        self._version = _C.version_of(tensor)

    def note_written(self) -> None:
        """Compares it with what it was when this was made."""
        tensor = self.tensor
        assert tensor is not None
        is_other = self._look() is not tensor
        self.is_written = is_other or _C.version_of(tensor) != self._version

    @property
    def is_carried(self) -> bool:
        """True if bad values were read of it, which the step may have left."""
        return self.is_written and self.is_read


def held_leaves(
    models: Mapping[str, nn.Module], around: Mapping[str, Any]
) -> list[HeldTensor]:
    """Finds attributes of modules that are tensors, and what objects hold.

    Runs none of the user's code. Does not incur a CPU-GPU sync.

    Args:
        models: The watched models, by what their modules' names begin with.
        around: The variables that the replayed code reads, by their names.
    """
    watched = {each for model in models.values() for each in modules_in(model)}
    found = [
        leaf
        for prefix, model in models.items()
        for name, module in named_modules(model)
        for leaf in _attributes("attribute", full_name(prefix, name), module)
    ]
    seen = set(watched)
    for variable, value in around.items():
        near = find(value, (torch.Tensor, nn.Module))
        for path, each in sorted(near, key=lambda one: len(one[0])):
            if each in seen:
                continue
            seen.add(each)
            name = f"{variable}{path_text(path)}"
            if isinstance(each, torch.Tensor):
                look = functools.partial(at, value, path)
                found.append(HeldTensor("object", name, each, look))
            else:
                found += _of_module(name, each)
    return found


def _attributes(kind: str, name: str, owner: Any) -> Iterator[HeldTensor]:
    for key, value in list(vars(owner).items()):
        for path, tensor in () if key in _OWN else data_in(value):
            full = f"{name}.{key}" if name else key
            look = functools.partial(_at, owner, key, path)
            yield HeldTensor(kind, f"{full}{path_text(path)}", tensor, look)


def _of_module(name: str, module: nn.Module) -> Iterator[HeldTensor]:
    """Yields the weights of a module that is not watched, and its attributes."""
    for key, tensor in [*named_parameters(module), *named_buffers(module)]:
        look = functools.partial(_itself, tensor)
        yield HeldTensor("weight", f"{name}.{key}", tensor, look)
    for key, each in named_modules(module):
        yield from _attributes("object", f"{name}.{key}".rstrip("."), each)


def _at(owner: Any, key: str, path: Path) -> Any:
    return at(held(owner, key), path)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
