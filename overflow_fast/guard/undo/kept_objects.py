"""The mutable objects that can be reached from some: what they hold, kept by identity.

Entered are containers, functions with what they are bound to, NumPy's arrays, weak
references, and what all of these, tensors and other objects have in attributes or
slots, which `tree` reads. Not entered is what is no state of a model: modules of
Python, objects of torch (but modules, optimizers, distributions), of the standard
library (but containers), of trainers and of this package. None of the user's code runs:
what a subclass overrides is not called.
"""

from __future__ import annotations

import array
import collections
import contextvars
import enum
import functools
import gc
import io
import operator
import socket
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ...scanner.tree import attributes, layout, set_attributes
from ..libraries import PACKAGES
from .random import generator_of, is_same_state, seeds_of

_MAX_BYTES = 2**28  # of an array that is copied, which takes 0.05 s or more
MOST = 100_000  # objects, which take 1.2 s
ATOMS = frozenset(
    {
        *(bool, int, float, complex, str, bytes, type(None), type, range, slice),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
        *(types.ModuleType, type(Ellipsis)),
    }
)
_CLOSED = {
    *("overflow_fast", "torch", "torchgen", "functorch", "triton", "numpy"),
    *PACKAGES,
}
# Of torch and the standard library: objects that hold state of a model, and no more.
_OPEN_PARTS = ("torch.optim", "torch.amp", "torch.distributions", "torch.quasirandom")
_OPEN_PACKAGES = {"collections", "types", "argparse", "weakref", "_weakrefset"}
LEFT: Any = object()  # in the place of a value that is not kept, or not there
_QUEUES = {"queue", "_queue", "multiprocessing.queues"}  # other threads write to them
CACHED = type(functools.lru_cache(len))
_FUNCTIONS = (
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType),
    types.MethodWrapperType,
    *(functools.partial, weakref.ReferenceType),
)
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
KEY, ATTRIBUTE, INDEX = "[{!r}]", ".{}", "[{}]"  # how a part is named
_TABLES = ("_parameters", "_buffers", "_modules")
_PLAIN_TABLES = (dict, collections.OrderedDict, set)
BARE = frozenset(vars(nn.Module())) - {"training"}  # what torch keeps in each module


class Kept(Protocol):
    """Something that is kept: it can be restored, and compared with what it was.

    Attributes:
        name: The name of the object.
    """

    name: str

    def restore(self) -> None:
        """Makes it what it was."""

    def has_changed(self) -> bool:
        """True if it is not what it was."""


class Access(NamedTuple):
    """Reads the contents of a kind of object as a list, and replaces them by one.

    Attributes:
        form: How a part is named: by an attribute, a key, an index, or not at all.
        read: Returns the contents; keys and values in turn, where parts have keys.
        replace: Gives an object other contents.
    """

    form: str
    read: Callable[[Any], list[Any]]
    replace: Callable[[Any, list[Any]], None]


class ObjectContents:
    """The contents of an object, by identity.

    Attributes:
        access: How they are read and replaced.
        before: What they were.
    """

    def __init__(self, name: str, value: Any, access: Access) -> None:
        self.name, self._value, self.access = name, value, access
        self.before = self.now()

    def now(self) -> list[Any]:
        """Reads them now."""
        return self.access.read(self._value)

    def restore(self) -> None:
        if self.has_changed():
            self.access.replace(self._value, self.before)

    def has_changed(self) -> bool:
        return not _is_identical(self.now(), self.before)


class _Empty:
    """Containers that are empty, as most tables of hooks are."""

    def __init__(self, name: str, values: list[tuple[Any, Access]]) -> None:
        self.name, self._values = name, values
        self._all = [value for value, _ in values]

    def restore(self) -> None:
        if self.has_changed():
            for value, access in self._values:
                access.replace(value, [])

    def has_changed(self) -> bool:
        return any(self._all)


class _Array:
    """The numbers in an array of NumPy's, or of Python's `array`, or in a bytearray."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self._value = name, value
        self._before = value[...].copy() if _is_numpys(value) else value[:]

    def restore(self) -> None:
        if not self.has_changed():  # its memory may be read-only
            return
        value: Any = self._value
        if _is_numpys(value) and value.shape != self._before.shape:
            value.resize(self._before.shape, refcheck=False)
        value[... if _is_numpys(value) else slice(None)] = self._before

    def has_changed(self) -> bool:
        if _is_numpys(self._value):
            is_same = self._value.shape == self._before.shape
            return not is_same or bool(self._value.tobytes() != self._before.tobytes())
        return bytes(self._value) != bytes(self._before)


class KeptGenerator:
    """The state of a generator of random numbers."""

    def __init__(self, name: str, get: Callable[[], Any], set: Callable[[Any], object]):
        self.name, self._get, self._set = name, get, set
        self._before = get()

    def restore(self) -> None:
        self._set(self._before)

    def has_changed(self) -> bool:
        return not is_same_state(self._get(), self._before)


class KeptObjects:
    """The contents of mutable objects, by identity, to be restored in place.

    Tensors, which other code keeps, are only listed.

    Args:
        opens: Returns True for an object whose attributes count; then no modules and
            functions are entered. None for the rule of this file.
        most_bytes: The size of the largest array that is copied.
        most_items: The size of the largest container that is read; None for any.

    Attributes:
        kept: What is kept, in the order in which it was met.
        lost: What cannot be restored: iterators, files, sockets, queues, caches of
            `functools`, and what is larger than is kept.
        tensors: The tensors that were met, by id, with the name of the first place.
        is_whole: All that can be reached was entered.
    """

    def __init__(
        self,
        opens: Callable[[Any], bool] | None = None,
        most_bytes: int = _MAX_BYTES,
        most_items: int | None = None,
    ) -> None:
        self._opens = _is_state if opens is None else opens
        self._most_bytes, self._most_items = most_bytes, most_items
        self._is_narrow = opens is not None
        self._seen: dict[int, Any] = {}
        self.kept: list[Kept] = []
        self.lost: list[Any] = []
        self.tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self.is_whole = True

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

    @property
    def num_items(self) -> int:
        """The number of values that all containers hold together."""
        return sum(len(e.before) for e in self.kept if isinstance(e, ObjectContents))

    def restore(self) -> list[tuple[str, str]]:
        """Makes all objects hold what they held.

        Returns:
            What stays changed, and why.
        """
        return restore_all(self.kept)

    def _keep(self, name: str, value: Any, access: Access) -> list[Any]:
        contents = ObjectContents(name, value, access)
        self.kept.append(contents)
        return contents.before

    def _visit(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Keeps one object; yields those that it holds, with their names."""
        kind = type(value)
        if issubclass(kind, (type, enum.Enum)):
            return
        if self._is_large(value):
            self.lost.append(value)
        elif issubclass(kind, torch.Tensor):
            self.tensors[id(value)] = name, value
            if kind in _PLAIN_TENSORS or self._opens(value):
                yield from self._of_object(name, value)
        elif issubclass(kind, nn.Module) and not self._is_narrow:
            yield from self._of_module(name, value)
        elif (generator := generator_of(value)) is not None:
            self.kept.append(KeptGenerator(name, *generator))
            yield from ((name, each) for each in seeds_of(value))
            yield from self._of_object(name, value)  # of a subclass
        elif kind is contextvars.ContextVar:
            yield from _indexed(name, self._keep(name, value, _VARIABLE))
        elif issubclass(kind, (tuple, frozenset)):
            yield from _indexed(name, list(_plain_items(value)))
            yield from self._of_object(name, value)
        elif (access := access_of(kind)) is not None:
            yield from self._of_container(name, value, access)
            yield from self._of_object(name, value)  # of a subclass
        elif issubclass(kind, _FUNCTIONS):
            if not self._is_narrow:
                yield from self._of_function(name, value)
        elif is_array(value):
            yield from self._of_array(name, value)
        elif (behind := _behind(value)) is not None:
            yield name, behind
        elif self._opens(value):
            yield from self._of_object(name, value)
        elif _is_without_copy(kind) and not _is_terminal(value):
            self.lost.append(value)

    def _of_container(
        self, name: str, value: Any, access: Access
    ) -> Iterator[tuple[str, Any]]:
        before = self._keep(name, value, access)
        yield from (_of_pairs if access.form == KEY else _indexed)(name, before)

    def _of_module(self, name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
        prefix = f"{name}." if name else ""
        own = dict(pairs(self._keep(name, module, attributes_of(type(module)))))
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
            elif (access := access_of(type(value))) is None:
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
        if not has_attributes(type(value)):
            return
        own = pairs(self._keep(name, value, attributes_of(type(value))))
        yield from ((f"{name}.{key}", e) for key, e in own if type(e) not in ATOMS)

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
        yield from _indexed(name, list(value.__defaults__ or ()))
        yield name, value.__kwdefaults__
        yield name, vars(value)
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        for key, cell in cells:
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                yield from ((key, each) for each in self._keep(key, cell, _CELL))

    def _of_array(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        yield from self._of_object(name, value)  # of a subclass
        if _is_numpys(value) and not value.flags.writeable:
            return
        if _is_numpys(value) and value.dtype.hasobject:
            yield from _indexed(name, self._keep(name, value, _CELLS))
        else:
            self.kept.append(_Array(name, value))

    def _is_large(self, value: Any) -> bool:
        """True for what is not even read: that takes as long as a copy."""
        size = _num_bytes(value)
        if size is not None:
            return size > self._most_bytes
        most = self._most_items
        return most is not None and _num_items(value) > most


def restore_all(kept: Iterable[Kept]) -> list[tuple[str, str]]:
    """Restores each on its own; returns the names of what stays changed, and why."""
    problems = []
    for each in kept:
        try:
            each.restore()
        except Exception as error:
            problems.append((each.name, f"{type(error).__name__}: {error}"))
    return problems


def _is_without_copy(kind: type) -> bool:
    """True for iterators, files, sockets, queues, and caches of `functools`."""
    if kind.__module__ in _QUEUES or kind is CACHED:
        return True
    return hasattr(kind, "__next__") or issubclass(kind, (io.IOBase, socket.socket))


def _is_terminal(value: Any) -> bool:
    """True for the streams of the process, into which what is written is no state."""
    return any(value is each for each in (sys.stdin, sys.stdout, sys.stderr))


# How contents are read and replaced, by the methods of the builtin types.


def _is_identical(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def flat_of(items: Iterable[tuple[Any, Any]]) -> list[Any]:
    """Keys and values in turn, as contents are kept."""
    flat: list[Any] = []
    for item in items:
        flat += item
    return flat


def pairs(flat: list[Any]) -> Iterator[tuple[Any, Any]]:
    """The keys and values that `flat_of()` was given."""
    return zip(flat[::2], flat[1::2], strict=True)


def _read_dict(value: Any) -> list[Any]:
    return flat_of(dict.items(value))


def _fill_dict(value: Any, flat: list[Any]) -> None:
    if not _is_identical(list(dict.keys(value)), flat[::2]):
        dict.clear(value)
    dict.update(value, pairs(flat))


def _read_attributes(value: Any) -> list[Any]:
    return flat_of(attributes(value))


def _read_own_dict(value: Any) -> list[Any]:
    own = object.__getattribute__(value, "__dict__")
    return flat_of(own.items()) if type(own) is dict else []


def _fill_attributes(value: Any, flat: list[Any]) -> None:
    set_attributes(value, list(pairs(flat)))


def _read_ordered(value: Any) -> list[Any]:
    return flat_of(collections.OrderedDict.items(value))


def _fill_ordered(value: Any, flat: list[Any]) -> None:
    kind = collections.OrderedDict
    kind.clear(value)
    for key, each in pairs(flat):
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


def _fill_cells(value: Any, items: list[Any]) -> None:
    for place, each in enumerate(items):
        value.flat[place] = each


_ATTRIBUTES = Access(ATTRIBUTE, _read_attributes, _fill_attributes)
_OWN_DICT = Access(ATTRIBUTE, _read_own_dict, _fill_attributes)
_CELL = Access("", _read_cell, _fill_cell)
_VARIABLE = Access("", _read_variable, _fill_variable)
_CELLS = Access(INDEX, lambda value: list(value.flat), _fill_cells)
_CONTAINERS: tuple[tuple[type, Access], ...] = (
    (collections.OrderedDict, Access(KEY, _read_ordered, _fill_ordered)),
    (dict, Access(KEY, _read_dict, _fill_dict)),
    (list, Access(INDEX, lambda v: list.__getitem__(v, slice(None)), _fill_list)),
    (
        collections.deque,
        Access(INDEX, lambda v: list(collections.deque.__iter__(v)), _fill_deque),
    ),
    (set, Access("", _read_set, _fill_set)),
)
_SIZED: tuple[Any, ...] = (*(kind for kind, _ in _CONTAINERS), tuple, frozenset)


def has_attributes(kind: type) -> bool:
    """True for a type whose objects have attributes or slots."""
    known = layout(kind)
    return known.has_dict or bool(known.slots)


def attributes_of(kind: type) -> Access:
    """How the attributes of a type's objects are read: most have no slots."""
    known = layout(kind)
    return _OWN_DICT if known.has_dict and not known.slots else _ATTRIBUTES


def access_of(kind: type) -> Access | None:
    for base, access in _CONTAINERS:
        if issubclass(kind, base):
            return access
    return None


def _num_bytes(value: Any) -> int | None:
    """The bytes of an array of numbers that can be written to; None for others."""
    if issubclass(type(value), (bytearray, array.array)):
        return memoryview(value).nbytes
    if not _is_numpys(value) or value.dtype.hasobject:
        return None
    return int(value.nbytes) if value.flags.writeable else 0


def _num_items(value: Any) -> int:
    """The length of a container, or of an array of objects; 0 for others."""
    for kind in _SIZED:
        if issubclass(type(value), kind):
            return int(kind.__len__(value))
    return int(value.size) if _is_numpys(value) and value.dtype.hasobject else 0


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


def _package(module: object) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""


def _is_numpys(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and issubclass(type(value), numpy.ndarray)


def is_array(value: Any) -> bool:
    return isinstance(value, (bytearray, array.array)) or _is_numpys(value)


# Names of parts.


def _plain_items(value: Any) -> Iterator[Any]:
    kind = tuple if isinstance(value, tuple) else frozenset
    return kind.__iter__(value)


def _of_pairs(name: str, flat: list[Any]) -> Iterator[tuple[str, Any]]:
    for key, each in pairs(flat):
        yield f"{name}[{key!r}]" if type(key) in ATOMS else name, each
        yield name, key


def _indexed(name: str, items: list[Any]) -> Iterator[tuple[str, Any]]:
    for place, each in enumerate(items):
        if type(each) not in ATOMS:
            yield f"{name}[{place}]", each
