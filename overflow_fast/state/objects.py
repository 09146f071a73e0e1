"""The mutable objects that can be reached from some: what they hold, kept by identity.

Entered are containers, functions with what they are bound to, NumPy's arrays, weak
references, and what all of these, tensors and other objects have in attributes or
slots, which `tree` reads. Not entered is what is no state of a model: modules of
Python, objects of torch (but modules, optimizers, distributions), of the standard
library (but containers), of trainers and of this package, and an object that holds one
of the models itself, such as the program's own trainer. None of the user's code runs:
what a subclass overrides is not called.

What the program's code reads besides its models is kept by `KeptObjects.add_around()`:
variables, its classes' attributes and global variables, and the data of its trainer.
"""

from __future__ import annotations

import array
import collections
import contextvars
import dis
import enum
import functools
import gc
import io
import itertools
import operator
import queue
import socket
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ..text import is_of_program
from ..tree import Layout, attributes, layout, set_attributes
from .random import generator_of, is_same_state, seeds_of

_MAX_BYTES = 2**28  # of an array that is copied
MOST = 100_000  # objects
ATOMS = frozenset(
    {
        *(bool, int, float, complex, str, bytes, type(None), type, range, slice),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
        *(types.ModuleType, type(Ellipsis)),
    }
)
_CLOSED = {
    *("overflow_fast", "torch", "torchgen", "functorch", "triton", "numpy"),
    *("lightning", "lightning_fabric", "pytorch_lightning", "accelerate", "deepspeed"),
}
# Of torch and the standard library: objects that hold state of a model, and no more.
_OPEN_PARTS = ("torch.optim", "torch.amp", "torch.distributions")
_OPEN_PACKAGES = {"collections", "types", "argparse", "weakref", "_weakrefset"}
LEFT: Any = object()  # in the place of a value that is not kept, or not there
_QUEUES = {"queue", "_queue", "multiprocessing.queues"}  # other threads write to them
_FUNCTIONS = (
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType),
    *(functools.partial, weakref.ReferenceType),
)
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
_NUMBERS = (bool, int, float, str)
_KEY, _ATTRIBUTE, _INDEX, _NAME = "[{!r}]", ".{}", "[{}]", "{}"
_TABLES = ("_parameters", "_buffers", "_modules")
_PLAIN_TABLES = (dict, collections.OrderedDict, set)
BARE = frozenset(vars(nn.Module())) - {"training"}  # what torch keeps in each module


class Kept(Protocol):
    """Something that is kept: it can be restored, and compared with what it was."""

    name: str

    def restore(self) -> None:
        """Makes it what it was."""

    def has_changed(self) -> bool:
        """True if it is not what it was."""

    def difference(self) -> str:
        """The name of a number or a generator in it that is another one, or ""."""


class _Access(NamedTuple):
    """Reads the contents of a kind of object as a list, and replaces them by one.

    `form` is how a part is named: by an attribute, a key, an index, or not at all.
    """

    form: str
    read: Callable[[Any], list[Any]]
    replace: Callable[[Any, list[Any]], None]

    def difference(self, name: str, now: list[Any], before: list[Any]) -> str:
        """The name of the first number that is another one now, or ""."""
        pairs: Iterable[tuple[Any, Any, Any]]
        if self.form in (_KEY, _ATTRIBUTE, _NAME):
            held = {id(key): each for key, each in _pairs(now)}
            pairs = ((key, each, held.get(id(key))) for key, each in _pairs(before))
        else:
            own = itertools.zip_longest(before, now[: len(before)])
            pairs = ((place, *both) for place, both in enumerate(own))
        for key, each, other in pairs:
            if type(each) in _NUMBERS and each is not other and each != other:
                return name + self.form.format(key)
        return ""


class _Contents:
    """The contents of an object, by identity."""

    def __init__(self, name: str, value: Any, access: _Access) -> None:
        self.name, self._value, self._access = name, value, access
        self.before = access.read(value)

    def restore(self) -> None:
        if not _is_identical(self._access.read(self._value), self.before):
            self._access.replace(self._value, self.before)

    def has_changed(self) -> bool:
        return not _is_identical(self._access.read(self._value), self.before)

    def difference(self) -> str:
        return self._access.difference(
            self.name, self._access.read(self._value), self.before
        )


class _Empty:
    """Containers that are empty, as most tables of hooks are."""

    def __init__(self, name: str, values: list[tuple[Any, _Access]]) -> None:
        self.name, self._values = name, values
        self._all = [value for value, _ in values]

    def restore(self) -> None:
        if self.has_changed():
            for value, access in self._values:
                access.replace(value, [])

    def has_changed(self) -> bool:
        return any(self._all)

    def difference(self) -> str:
        return ""


class _Array:
    """The numbers in an array of NumPy's, or of Python's `array`, or in a bytearray."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self._value = name, value
        self._before = value[...].copy() if _is_numpys(value) else value[:]

    def restore(self) -> None:
        value: Any = self._value
        if _is_numpys(value) and value.shape != self._before.shape:
            value.resize(self._before.shape, refcheck=False)
        value[... if _is_numpys(value) else slice(None)] = self._before

    def has_changed(self) -> bool:
        if _is_numpys(self._value):
            is_same = self._value.shape == self._before.shape
            return not is_same or bool(self._value.tobytes() != self._before.tobytes())
        return bytes(self._value) != bytes(self._before)

    def difference(self) -> str:
        return ""


class _Generator:
    """The state of a generator of random numbers."""

    def __init__(self, name: str, get: Callable[[], Any], set: Callable[[Any], object]):
        self.name, self._get, self._set = name, get, set
        self._before = get()

    def restore(self) -> None:
        self._set(self._before)

    def has_changed(self) -> bool:
        return not is_same_state(self._get(), self._before)

    def difference(self) -> str:
        return self.name if self.has_changed() else ""


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

    def difference(self) -> str:
        return ""  # its place is no number that the program sets


class KeptObjects:
    """The contents of mutable objects, by identity, to be restored in place.

    Tensors, which other code keeps, are only listed.

    Args:
        models: Other objects that hold one of these are not entered.
        opens: Returns True for an object whose attributes count; then no modules and
            functions are entered. None for the rule of this file.

    Attributes:
        tensors: The tensors that were met, by id, with the name of the first place.
        is_whole: All that can be reached was entered.
    """

    def __init__(
        self,
        models: Iterable[nn.Module] = (),
        opens: Callable[[Any], bool] | None = None,
    ) -> None:
        self._models = {id(model) for model in models}
        self._opens = _is_state if opens is None else opens
        self._is_narrow = opens is not None
        self._seen: dict[int, Any] = {}
        self.kept: list[Kept] = []
        self.tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self.is_whole = True
        self._is_around = False
        self._data_alone: set[int] = set()
        self._code: list[Any] = []  # functions and classes
        self._code_ids: set[int] = set()

    def add(self, roots: Iterable[tuple[str, Any]], most: int = MOST) -> None:
        """Keeps what can be reached from objects that are not kept yet, nearest first.

        Args:
            roots: The objects, each with its name.
            most: How many objects are entered.
        """
        waiting, most = collections.deque(roots), most + len(self._seen)
        while waiting:
            self.is_whole = len(self._seen) < most
            if not self.is_whole:
                break
            name, value = waiting.popleft()
            if type(value) not in ATOMS and id(value) not in self._seen:
                self._seen[id(value)] = value
                waiting.extend(self._visit(name, value))

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

    @property
    def num_items(self) -> int:
        """The number of values that all containers hold together."""
        return sum(len(e.before) for e in self.kept if isinstance(e, _Contents))

    @property
    def lost(self) -> list[str]:
        """The names of what cannot be restored: see `is_without_copy()`."""
        return [each.name for each in self.kept if isinstance(each, _WithoutCopy)]

    def taken_from(self, first: int = 0) -> list[str]:
        """Those of `lost` that are, or may be, not what they were.

        Args:
            first: Of what was kept from this place on.
        """
        found = (each for each in self.kept[first:] if isinstance(each, _WithoutCopy))
        return [each.name for each in found if each.has_changed()]

    def restore(self) -> list[tuple[str, str]]:
        """Makes all objects hold what they held.

        Returns:
            What stays changed, and why.
        """
        return restore_all(self.kept)

    def differences(self, first: int = 0, last: int | None = None) -> list[str]:
        """The names of numbers and generators that are not as they were.

        What cannot be restored is left out: see `taken_from()`.

        Args:
            first: Of what was kept from this place on.
            last: Of what was kept before this place; None for all.
        """
        return [name for each in self.kept[first:last] if (name := each.difference())]

    def _keep(self, name: str, value: Any, access: _Access) -> list[Any]:
        contents = _Contents(name, value, access)
        self.kept.append(contents)
        return contents.before

    def _visit(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Keeps one object; yields those that it holds, with their names."""
        kind = type(value)
        if issubclass(kind, (type, enum.Enum)):
            return
        if issubclass(kind, torch.Tensor):
            self.tensors[id(value)] = name, value
            if kind in _PLAIN_TENSORS or self._opens(value):
                yield from self._of_object(name, value)
        elif issubclass(kind, nn.Module) and not self._is_narrow:
            yield from self._of_module(name, value)
        elif (generator := generator_of(value)) is not None:
            self.kept.append(_Generator(name, *generator))
            yield from ((name, each) for each in seeds_of(value))
            yield from self._of_object(name, value)  # of a subclass
        elif kind is contextvars.ContextVar:
            yield from _indexed(name, self._keep(name, value, _VARIABLE))
        elif issubclass(kind, (tuple, frozenset)):
            yield from _indexed(name, list(_plain_items(value)))
            yield from self._of_object(name, value)
        elif (access := _access_of(kind)) is not None:
            yield from self._of_container(name, value, access)
        elif issubclass(kind, _FUNCTIONS):
            if not self._is_narrow:
                yield from self._of_function(name, value)
        elif _is_array(value):
            yield from self._of_array(name, value)
        elif (behind := _behind(value)) is not None:
            yield name, behind
        elif self._opens(value):
            yield from self._of_object(name, value)
        elif is_without_copy(kind) and not _is_terminal(value):
            self.kept.append(_WithoutCopy(name, value))

    def _of_container(
        self, name: str, value: Any, access: _Access
    ) -> Iterator[tuple[str, Any]]:
        before = self._keep(name, value, access)
        parts: Iterable[tuple[str, Any]] = _indexed(name, before)
        if access.form == _KEY:
            parts = _of_pairs(name, before)
        if id(value) in self._data_alone:
            parts = self._only_data(parts)
        yield from parts
        yield from self._of_object(name, value)  # of a subclass

    def _of_module(self, name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
        prefix = f"{name}." if name else ""
        own = dict(
            _pairs(self._keep(name, module, _attributes_of(layout(type(module)))))
        )
        self._note_code(type(module))
        if isinstance(module, torch.jit.ScriptModule):  # TorchScript has its tensors
            for tensors in (module.named_parameters, module.named_buffers):
                for key, each in tensors(recurse=False):
                    yield f"{prefix}{key}", each
        empty = []
        for key, value in own.items():
            if type(value) in ATOMS:
                continue
            if key not in BARE:
                yield f"{prefix}{key}", value
            elif (access := _access_of(type(value))) is None:
                continue
            elif type(value) in _PLAIN_TABLES and not value:
                empty.append((value, access))
            else:
                self._keep(f"{prefix}{key}", value, access)
                if key in _TABLES:
                    for inner, each in list(value.items()):
                        yield f"{prefix}{inner}", each
        self.kept.append(_Empty(name, empty))

    def _of_object(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        known = layout(type(value))
        if not (known.has_dict or known.slots):
            return
        access = _attributes_of(known)
        own = list(_pairs(access.read(value)))
        holds_model = any(id(each) in self._models for _, each in own)
        if holds_model and not self._is_around:
            return
        self._keep(name, value, access)
        self._note_code(type(value))
        parts = ((f"{name}.{key}", e) for key, e in own if type(e) not in ATOMS)
        yield from self._only_data(parts) if holds_model else parts

    def _only_data(self, parts: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yields those that are data, in which no other objects will be entered."""
        for name, value in parts:
            if _is_data(value):
                self._data_alone.add(id(value))
                yield name, value

    def _of_function(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, weakref.ReferenceType):
            yield name, value()
            return
        if not isinstance(value, (types.FunctionType, functools.partial)):
            yield name, value.__self__  # of a method
            return
        if isinstance(value, functools.partial):
            yield from _indexed(name, [value.func, *value.args])
            yield name, value.keywords
            yield from self._of_object(name, value)
            return
        if _package(value.__module__) in _CLOSED | sys.stdlib_module_names:
            return
        self._note_code(value)
        yield from _indexed(name, list(value.__defaults__ or ()))
        yield name, value.__kwdefaults__
        yield name, vars(value)
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        for key, cell in cells:
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                yield from ((key, each) for each in self._keep(key, cell, _CELL))

    def _note_code(self, value: Any) -> None:
        """Notes a function, or a class with its bases, for `add_around()`."""
        for each in value.__mro__ if isinstance(value, type) else (value,):
            if id(each) not in self._code_ids:
                self._code_ids.add(id(each))
                self._code.append(each)

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
        names = _names(value.__code__)
        yield from self._of_variables("", value.__globals__, names.all, names.set)
        for name, around in _modules_read(names.all, value.__globals__):
            yield from self._of_variables(f"{name}.", around, names.all, names.given)

    def _of_variables(
        self, prefix: str, around: dict[str, Any], names: _Names, written: _Names
    ) -> Iterator[tuple[str, Any]]:
        """Keeps variables of a module; yields what those of some names hold."""
        self._keep(prefix, (around, written), _GLOBALS)
        for name in names:
            each = around.get(name)
            if isinstance(each, type):
                self._note_code(each)
            for part in _functions_of(each):
                yield f"{prefix}{name}", part

    def _of_array(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        yield from self._of_object(name, value)  # of a subclass
        if _is_numpys(value) and not value.flags.writeable:
            return
        if _is_numpys(value) and value.dtype.hasobject:
            yield from _indexed(name, self._keep(name, value, _CELLS))
        elif _is_numpys(value) and value.nbytes > _MAX_BYTES:
            self.kept.append(_WithoutCopy(name, value))
        else:
            self.kept.append(_Array(name, value))


def restore_all(kept: Iterable[Kept]) -> list[tuple[str, str]]:
    """Restores each on its own; returns the names of what stays changed, and why."""
    problems = []
    for each in kept:
        try:
            each.restore()
        except Exception as error:
            problems.append((each.name, f"{type(error).__name__}: {error}"))
    return problems


def is_without_copy(kind: type) -> bool:
    """True for iterators, files, sockets, queues, and caches of `functools`."""
    if kind.__module__ in _QUEUES or kind is _CACHED:
        return True
    return hasattr(kind, "__next__") or issubclass(kind, (io.IOBase, socket.socket))


def is_taken_from(value: Any) -> bool:
    """True for what gives or takes something else each time it is used.

    That is what has no copy, but for caches and the streams of the process.
    """
    kind = type(value)
    return kind is not _CACHED and is_without_copy(kind) and not _is_terminal(value)


_CACHED = type(functools.lru_cache(len))
_SIZED = (queue.Queue, queue.SimpleQueue)


def _is_terminal(value: Any) -> bool:
    """True for the streams of the process, into which what is written is no state."""
    return any(value is each for each in (sys.stdin, sys.stdout, sys.stderr))


def _place_of(value: Any) -> Any:
    """How far an iterator is, or what a cache or queue holds; None if it is not seen.

    None of the user's code runs, and nothing is taken.
    """
    kind = type(value)
    if kind is _CACHED:
        found = value.cache_info()
        return found.misses, found.currsize  # a hit changes nothing
    if kind is itertools.count:
        return repr(value)
    if kind in _SIZED:
        return value.qsize()
    if kind.__module__ == "builtins" and hasattr(kind, "__length_hint__"):
        return operator.length_hint(value)
    return None


# How contents are read and replaced, by the methods of the builtin types.


def _is_identical(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _flat(pairs: Iterable[tuple[Any, Any]]) -> list[Any]:
    """Keys and values in turn, as contents are kept."""
    flat: list[Any] = []
    for pair in pairs:
        flat += pair
    return flat


def _pairs(flat: list[Any]) -> Iterator[tuple[Any, Any]]:
    """The keys and values that `_flat()` was given."""
    return zip(flat[::2], flat[1::2], strict=True)


def _read_dict(value: Any) -> list[Any]:
    return _flat(dict.items(value))


def _fill_dict(value: Any, flat: list[Any]) -> None:
    if not _is_identical(list(dict.keys(value)), flat[::2]):
        dict.clear(value)
    dict.update(value, _pairs(flat))


def _read_attributes(value: Any) -> list[Any]:
    return _flat(attributes(value))


def _read_own_dict(value: Any) -> list[Any]:
    own = object.__getattribute__(value, "__dict__")
    return _flat(own.items()) if type(own) is dict else []


def _fill_attributes(value: Any, flat: list[Any]) -> None:
    set_attributes(value, list(_pairs(flat)))


def _read_ordered(value: Any) -> list[Any]:
    return _flat(collections.OrderedDict.items(value))


def _fill_ordered(value: Any, flat: list[Any]) -> None:
    kind = collections.OrderedDict
    kind.clear(value)
    for key, each in _pairs(flat):
        kind.__setitem__(value, key, each)


def _fill_list(value: Any, items: list[Any]) -> None:
    list.__setitem__(value, slice(None), items)


def _fill_deque(value: Any, items: list[Any]) -> None:
    collections.deque.clear(value)
    collections.deque.extend(value, items)


def _read_set(value: Any) -> list[Any]:
    return sorted(set.__iter__(value), key=id)  # its own order may change


def _fill_set(value: Any, items: list[Any]) -> None:
    # Not by clear(): what stays in its place is iterated over in the same order.
    known = set(map(id, items))
    set.difference_update(value, [e for e in set.__iter__(value) if id(e) not in known])
    set.update(value, items)


def _read_cell(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # it is empty
        return []


def _fill_cell(cell: Any, items: list[Any]) -> None:
    if items:
        cell.cell_contents = items[0]
    else:
        del cell.cell_contents


def _read_variable(variable: contextvars.ContextVar[Any]) -> list[Any]:
    value = variable.get(LEFT)
    return [] if value is LEFT else [value]


def _fill_variable(variable: contextvars.ContextVar[Any], items: list[Any]) -> None:
    # No value can be taken from it: it gets its default, which an empty context has.
    variable.set(items[0] if items else contextvars.Context().run(variable.get))


def _own_parts(kind: type) -> list[tuple[str, Any]]:
    own = type.__dict__["__dict__"].__get__(kind).items()
    return [(k, v) for k, v in own if not k.startswith(("__", "_abc_"))]


def _read_class(kind: type) -> list[Any]:
    """Reads data, and no methods: a replay's patches may stand in their place."""
    return _flat((k, v) for k, v in _own_parts(kind) if not isinstance(v, _METHODS))


def _fill_class(kind: type, flat: list[Any]) -> None:
    before = dict(_pairs(flat))
    for key, value in _pairs(_read_class(kind)):
        if key not in before:
            type.__delattr__(kind, key)
        elif before[key] is value:
            del before[key]
    for key, value in before.items():
        type.__setattr__(kind, key, value)


def _read_globals(value: tuple[dict[str, Any], tuple[str, ...]]) -> list[Any]:
    around, names = value
    return _flat((name, around[name]) for name in names if name in around)


def _fill_globals(
    value: tuple[dict[str, Any], tuple[str, ...]], flat: list[Any]
) -> None:
    around, names = value
    before = dict(_pairs(flat))
    for name in names:
        if name not in before:
            around.pop(name, None)
    around.update(before)


def _fill_cells(value: Any, items: list[Any]) -> None:
    for place, each in enumerate(items):
        value.flat[place] = each


_ATTRIBUTES = _Access(_ATTRIBUTE, _read_attributes, _fill_attributes)
_OWN_DICT = _Access(_ATTRIBUTE, _read_own_dict, _fill_attributes)
_CLASS = _Access(_ATTRIBUTE, _read_class, _fill_class)
_GLOBALS = _Access(_NAME, _read_globals, _fill_globals)
_CELL = _Access("", _read_cell, _fill_cell)
_VARIABLE = _Access("", _read_variable, _fill_variable)
_CELLS = _Access(_INDEX, lambda value: list(value.flat), _fill_cells)
_CONTAINERS: tuple[tuple[type, _Access], ...] = (
    (collections.OrderedDict, _Access(_KEY, _read_ordered, _fill_ordered)),
    (dict, _Access(_KEY, _read_dict, _fill_dict)),
    (list, _Access(_INDEX, lambda v: list.__getitem__(v, slice(None)), _fill_list)),
    (
        collections.deque,
        _Access(_INDEX, lambda v: list(collections.deque.__iter__(v)), _fill_deque),
    ),
    (set, _Access("", _read_set, _fill_set)),
)


def _attributes_of(known: Layout) -> _Access:
    """How the attributes of objects are read: most have no slots."""
    return _OWN_DICT if known.has_dict and not known.slots else _ATTRIBUTES


def _access_of(kind: type) -> _Access | None:
    for base, access in _CONTAINERS:
        if issubclass(kind, base):
            return access
    return None


def _behind(value: Any) -> Any:
    """The mutable object that a view shows; the attributes that a thread has."""
    kind = type(value)
    if kind is memoryview:
        return None if value.readonly else value.obj
    if kind is types.MappingProxyType:
        shown = next((e for e in gc.get_referents(value) if isinstance(e, dict)), {})
        return None if "__module__" in shown else shown  # of a class
    return vars(value) if kind is threading.local else None


def _is_state(value: Any) -> bool:
    """True for an object whose attributes may be state of a model."""
    module = type(value).__module__
    package = _package(module)
    if package in _CLOSED:
        return isinstance(module, str) and module.startswith(_OPEN_PARTS)
    return package in _OPEN_PACKAGES or package not in sys.stdlib_module_names


def _is_data(value: Any) -> bool:
    """True for tensors, arrays, generators, and containers that can change."""
    if isinstance(value, torch.Tensor) or _is_array(value):
        return True
    return generator_of(value) is not None or _access_of(type(value)) is not None


def _package(module: object) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""


def _is_numpys(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_array(value: Any) -> bool:
    return isinstance(value, (bytearray, array.array)) or _is_numpys(value)


# Code of the program's own.


def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Global variables that a code, or a function or comprehension in it, reads."""
    return _names(code).read


def attribute_names(code: types.CodeType) -> tuple[str, ...]:
    """Names in a code that may be those of attributes; with those of what is in it."""
    return _names(code).all


_Names = tuple[str, ...]


class _NamesIn(NamedTuple):
    """Names in a code, and in the functions and comprehensions within it.

    Attributes:
        all: Of global variables and attributes.
        read: Of the global variables that it reads.
        set: Of the global variables that it assigns or deletes.
        given: Of the attributes that it assigns or deletes.
    """

    all: _Names
    read: _Names
    set: _Names
    given: _Names


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> _NamesIn:
    own = [(each.opname, each.argval) for each in dis.get_instructions(code)]
    inner = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    kinds: tuple[list[str], ...] = (
        list(code.co_names),
        [name for kind, name in own if kind in ("LOAD_GLOBAL", "LOAD_NAME")],
        [name for kind, name in own if kind in ("STORE_GLOBAL", "DELETE_GLOBAL")],
        [name for kind, name in own if kind in ("STORE_ATTR", "DELETE_ATTR")],
    )
    for each in inner:
        for names, more in zip(kinds, each, strict=True):
            names += more
    return _NamesIn(*(tuple(dict.fromkeys(names)) for names in kinds))


def _modules_read(
    names: _Names, around: dict[str, Any]
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


_METHODS = (types.FunctionType, staticmethod, classmethod, property)


def _functions_of(value: Any) -> tuple[Any, ...]:
    """The functions behind a method or a cached function; else the value."""
    if isinstance(value, property):
        return value.fget, value.fset, value.fdel
    is_wrapper = isinstance(value, (staticmethod, classmethod, _CACHED))
    return (value.__wrapped__ if is_wrapper else value,)


# Names of parts.


def _plain_items(value: Any) -> Iterator[Any]:
    kind = tuple if isinstance(value, tuple) else frozenset
    return kind.__iter__(value)


def _of_pairs(name: str, flat: list[Any]) -> Iterator[tuple[str, Any]]:
    for key, each in _pairs(flat):
        yield f"{name}[{key!r}]" if type(key) in ATOMS else name, each
        yield name, key


def _indexed(name: str, items: list[Any]) -> Iterator[tuple[str, Any]]:
    for place, each in enumerate(items):
        if type(each) not in ATOMS:
            yield f"{name}[{place}]", each
