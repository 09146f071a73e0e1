"""Contents of single objects, kept by identity and put back in place.

Containers, attributes, arrays and generators of random numbers. They are read and
replaced by the methods of the builtin types: none of the program's code runs, whatever
a subclass overrides.
"""

from __future__ import annotations

import array
import collections
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from ...base.tree import attributes, set_attributes
from .random import generator_of, is_same_state

KEY, ATTRIBUTE, INDEX = "[{!r}]", ".{}", "[{}]"  # how a part is named


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
    """The items of a container, or the attributes of an object, by identity.

    Attributes:
        access: How they are read and replaced.
        before: What they were.
    """

    def __init__(self, name: str, value: Any, access: Access) -> None:
        self.name, self._value, self.access = name, value, access
        self.before = self.now()

    def are_attributes_of(self, value: Any) -> bool:
        """True for what an object has as attributes."""
        return self._value is value and self.access is ATTRIBUTES

    def now(self) -> list[Any]:
        """Reads them now."""
        return self.access.read(self._value)

    def restore(self) -> None:
        if self.has_changed():
            self.access.replace(self._value, self.before)

    def has_changed(self) -> bool:
        return not _is_identical(self.now(), self.before)


class ArrayContents:
    """The items of an array of NumPy's, or of Python's `array`, or of a bytearray."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self._value = name, value
        self._before = value[...].copy() if is_numpys(value) else value[:]

    def restore(self) -> None:
        if not self.has_changed():  # its memory may be read-only
            return
        value: Any = self._value
        if is_numpys(value) and value.shape != self._before.shape:
            value.resize(self._before.shape, refcheck=False)
        value[... if is_numpys(value) else slice(None)] = self._before

    def has_changed(self) -> bool:
        if is_numpys(self._value):  # the bytes of objects are their identities
            is_same = self._value.shape == self._before.shape
            return not is_same or bool(self._value.tobytes() != self._before.tobytes())
        return bytes(self._value) != bytes(self._before)


class GeneratorContents:
    """The state of a generator of random numbers."""

    def __init__(self, name: str, get: Callable[[], Any], set: Callable[[Any], object]):
        self.name, self._get, self._set = name, get, set
        self._before = get()

    def restore(self) -> None:
        self._set(self._before)

    def has_changed(self) -> bool:
        return not is_same_state(self._get(), self._before)


def contents_of(name: str, value: Any) -> Kept | None:
    """Keeps what an object holds besides attributes; None where that is nothing."""
    access = access_of(type(value))
    if access is not None:
        return ObjectContents(name, value, access)
    if is_array(value):
        is_writable = not is_numpys(value) or value.flags.writeable
        return ArrayContents(name, value) if is_writable else None
    generator = generator_of(value)
    return None if generator is None else GeneratorContents(name, *generator)


def restore_all(kept: Iterable[Kept]) -> list[tuple[str, str]]:
    """Restores each on its own; returns the names of what stays changed, and why."""
    problems = []
    for each in kept:
        try:
            each.restore()
        except Exception as error:
            problems.append((each.name, f"{type(error).__name__}: {error}"))
    return problems


def pairs(flat: list[Any]) -> Iterator[tuple[Any, Any]]:
    """The keys and values of contents, which have them in turn."""
    return zip(flat[::2], flat[1::2], strict=True)


def access_of(kind: type) -> Access | None:
    """How the items of a kind of container are read; None for others."""
    for base, access in _CONTAINERS:
        if issubclass(kind, base):
            return access
    return None


def is_array(value: Any) -> bool:
    return isinstance(value, (bytearray, array.array)) or is_numpys(value)


def is_numpys(value: Any) -> bool:
    """True for an array of NumPy's."""
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and issubclass(type(value), numpy.ndarray)


def num_bytes_of(value: Any) -> int:
    """The bytes that a copy of an array takes; 0 for others."""
    if not is_numpys(value):
        return memoryview(value).nbytes if is_array(value) else 0
    return int(value.nbytes) if value.flags.writeable else 0


def num_items_of(value: Any) -> int:
    """The length of a container; 0 for others."""
    for kind in _SIZED:
        if issubclass(type(value), kind):
            return int(kind.__len__(value))
    return 0


def _is_identical(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _flat_of(items: Iterable[tuple[Any, Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(items))


def _fill_dict(value: Any, flat: list[Any]) -> None:
    if not _is_identical(list(dict.keys(value)), flat[::2]):
        dict.clear(value)
    dict.update(value, pairs(flat))


def _fill_ordered(value: Any, flat: list[Any]) -> None:
    kind = collections.OrderedDict
    kind.clear(value)
    for key, each in pairs(flat):
        kind.__setitem__(value, key, each)


def _fill_deque(value: Any, items: list[Any]) -> None:
    collections.deque.clear(value)
    collections.deque.extend(value, items)


def _fill_set(value: Any, items: list[Any]) -> None:
    # Not by clear(): what stays in its place is iterated over in the same order.
    known = set(map(id, items))
    set.difference_update(value, [e for e in set.__iter__(value) if id(e) not in known])
    set.update(value, items)


ATTRIBUTES = Access(
    ATTRIBUTE,
    lambda value: _flat_of(attributes(value)),
    lambda value, flat: set_attributes(value, list(pairs(flat))),
)
_CONTAINERS: tuple[tuple[type, Access], ...] = (
    (
        collections.OrderedDict,
        Access(
            KEY,
            lambda value: _flat_of(collections.OrderedDict.items(value)),
            _fill_ordered,
        ),
    ),
    (dict, Access(KEY, lambda value: _flat_of(dict.items(value)), _fill_dict)),
    (
        list,
        Access(
            INDEX,
            lambda value: list.__getitem__(value, slice(None)),
            lambda value, items: list.__setitem__(value, slice(None), items),
        ),
    ),
    (
        collections.deque,
        Access(
            INDEX, lambda value: list(collections.deque.__iter__(value)), _fill_deque
        ),
    ),
    (  # whose own order may change
        set,
        Access("", lambda value: sorted(set.__iter__(value), key=id), _fill_set),
    ),
)
_SIZED: tuple[Any, ...] = (*(kind for kind, _ in _CONTAINERS), tuple, frozenset)
