"""The walk over nested values: lists the tensors of a value, rebuilds it with others.

The rule, which the walks of the extension (`csrc/record/containers.h`) and of compiled
code (`detector/traced_walk.py`) follow, too:

- Opened are tuples (also named ones), lists, deques, dicts (also ordered ones,
  defaultdicts and `ModelOutput`), and all other objects that hold something in
  attributes: dataclasses, attrs classes, caches, batches of graphs, plain objects.
- Behind its items, a container of a subclass shows its attributes, as other objects do,
  but for those that are the items of the same names.
- A wrapper of a dict (a UserDict such as `BatchEncoding`; a Mapping whose `__getitem__`
  does nothing but read a dict in one attribute) shows that dict's items as its own.
- Another Mapping, or a class registered with torch's pytree, is opened as the object
  that it is. Without attributes, its registered function or its `items()` lists what it
  holds; these alone are code of others, and where they raise, the type is opaque.
- Never opened are modules, functions, types, iterators, files, enums, numpy's arrays
  and plain values. Tensors are leaves, also those of subclasses.
- What an instance holds counts, read by the methods of the builtin types and by static
  look-up: no property, no `__getattr__`, no overridden method runs.
- Containers are opened 16 deep, each once: cycles end, shared parts are listed at the
  first place. A tensor is listed at each place where an opened container holds it.
- A walk visits a million values, below objects 16,384, since an object may lead to the
  whole program; plain values are free.

What was not opened and refers to anything but plain values is opaque, such as a set of
tensors, an iterator, or a list nested too deep: `opaque` counts it by its type.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import io
import itertools
import re
import types
import weakref
from collections import Counter, OrderedDict, UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from .. import _C
from ..torch_internals.tensor_internals import pytree

MAX_DEPTH = 16  # containers in containers; chosen, not measured
# The arguments of a call, (args, kwargs), are two levels around the values given.
CALL_DEPTH = MAX_DEPTH + 2
# Of one value, and below objects, which may lead to the whole program; chosen, not
# measured.
MAX_VALUES = 1 << 20
MAX_VALUES_OF_OBJECTS = 1 << 14
# That a clean step opens in what a model is given: 5 us each, or less.
OBJECTS_OF_STEP = 1 << 12
_FEW = 64
_BARREN_DEPTH = 3

Style = Literal["index", "key", "attribute"]
INDEX: Style = "index"
KEY: Style = "key"
ATTRIBUTE: Style = "attribute"


class Part(NamedTuple):
    """One step of a path: how a value is read from the one that holds it.

    Attributes:
        style: "index" (`[0]`), "key" (`['x']`) or "attribute" (`.x`).
        value: The index, the key or the name.
    """

    style: Style
    value: Any


Path = tuple[Part, ...]


class NotRebuilt(TypeError):
    """Raised for a type of which no copy with other tensors can be made."""


def children(value: Any) -> list[tuple[Part, Any]] | None:
    """Lists what a container or an object holds.

    Runs none of the user's code, except for registered and C-level mapping types.

    Returns:
        The parts and the values; None for a leaf, which is not opened.
    """
    found = _contents(value)
    if found is None:
        return None
    return [(Part(style, key), child) for style, key, child in found.parts()]


def tensors(value: Any, depth: int = MAX_DEPTH) -> list[tuple[Path, torch.Tensor]]:
    """Lists the tensors of a value with their paths, depth first and in order.

    Does not incur a CPU-GPU sync.

    Args:
        value: Any value. A tensor is listed with the empty path.
        depth: The number of nested containers that are opened.
    """
    return find(value, (torch.Tensor,), depth)


def tensors_in(
    value: Any, depth: int = MAX_DEPTH, objects: int = MAX_VALUES
) -> list[torch.Tensor]:
    """Lists the tensors of a value, as `tensors()` does.

    Args:
        value: Any value.
        depth: The number of nested containers that are opened.
        objects: The number of objects that are opened.
    """
    parts = _parts_of_call(value) or (value,)
    if _LEAVES.issuperset(map(type, parts)):  # most calls, and what they return
        return [each for each in parts if type(each) in _TENSORS]
    if depth > 2 and all(map(_is_flat, parts)):
        return _of_flat(parts)
    walk = Walk((torch.Tensor,), depth, objects=objects)
    walk.visit(value)
    return walk.values


def _parts_of_call(value: Any) -> tuple[Any, ...]:
    """The arguments, if a value is those of a call: `(args, kwargs)`; else ()."""
    if type(value) is not tuple or tuple(map(type, value)) != (tuple, dict):
        return ()
    return *value[0], *value[1].values()


def call_tensors(args: Any, kwargs: Any) -> list[tuple[Path, torch.Tensor]]:
    """Lists the tensors that a call is given: `[0]['x']`, and `.mask` by keyword."""
    walk = Walk((torch.Tensor,))
    walk.visit_call(args, kwargs)
    return walk.found


def find(
    value: Any,
    kinds: tuple[type, ...],
    depth: int = MAX_DEPTH,
    most: int = MAX_VALUES,
) -> list[tuple[Path, Any]]:
    """Lists the values of some types with their paths; they are not opened.

    Args:
        value: Any value.
        kinds: The types, which may be those of plain values.
        depth: The number of nested containers that are opened.
        most: The number of values that are visited.
    """
    if issubclass(type(value), kinds):
        return [((), value)]
    if type(value) in _skipped_for(kinds):
        return []
    walk = Walk(kinds, depth, most=most)
    walk.visit(value)
    return walk.found


def opaque(value: Any, most: int = MAX_VALUES) -> dict[str, int]:
    """Counts what may hold tensors but was not opened, by the types' qualified names.

    These are sets, views and iterators, objects of C types, containers that are nested
    too deep, and what lies beyond the number of values that a walk visits.

    Returns:
        The number of values by the names of their types: `{"set": 1}`.
    """
    walk = Walk((torch.Tensor,), most=most)
    walk.visit(value)
    return dict(Counter(type_name(kind) for _, kind in walk.opaque))


def mapped(
    value: Any,
    change: Callable[[Any], Any],
    depth: int = MAX_DEPTH,
    *,
    kinds: tuple[type, ...] = (torch.Tensor,),
    anew: bool = False,
    has_empty: bool = False,
) -> Any:
    """Rebuilds a value with its tensors replaced.

    Nothing is written to the value. What holds no replaced tensor is used as it is;
    the rest is copied without `__init__`, `__copy__` or a setter, so that shared parts,
    cycles, factories, and attributes beside the items stay.

    Args:
        value: Any value.
        change: Called once for each distinct tensor, in order; returns its substitute,
            or the tensor itself to leave it.
        depth: The number of nested containers that are opened.
        kinds: The types of what is replaced.
        anew: Copy all containers that lead to a tensor, where that is possible, and all
            lists and dicts around them, for code that takes items out of them.
        has_empty: See `Rebuilding`.

    Raises:
        NotRebuilt: A tensor was replaced in an object of which no copy can be made.
    """
    made = Rebuilding(value, change, depth, kinds, anew, has_empty=has_empty)
    return made.of(value)


def copied(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Copies the containers of a value, not its tensors: see `anew` of `mapped()`."""
    return mapped(value, lambda tensor: tensor, depth, anew=True)


_Call = tuple[tuple[Any, ...], dict[str, Any]]


def copied_call(args: Any, kwargs: Any) -> tuple[_Call, list[torch.Tensor]]:
    """Copies the containers that a call is given, as `copied()` does.

    Returns:
        The arguments, and their tensors, as `tensors_in()` lists them.
    """
    values = (*args, *kwargs.values())
    if all(map(_is_flat, values)):  # most calls
        copies = {id(value): _shallow(value) for value in values}
        own = tuple(copies[id(value)] for value in args)
        named = {name: copies[id(value)] for name, value in kwargs.items()}
        return (own, named), _of_flat(values)
    call = tuple(args), dict(kwargs)
    kept = Rebuilding(
        *(call, lambda tensor: tensor, CALL_DEPTH, (torch.Tensor,)),
        anew=True,
        objects=OBJECTS_OF_STEP,
    )
    return kept.of(call), kept.walk.values


def _is_flat(value: Any) -> bool:
    kind = type(value)
    if kind in _LEAVES:
        return True
    is_sequence = kind is list or kind is tuple
    held = value.values() if kind is dict else value if is_sequence else None
    return held is not None and _LEAVES.issuperset(map(type, held))


def _of_flat(values: Iterable[Any]) -> list[torch.Tensor]:
    leaves, opened = [], set[int]()
    for value in values:
        if type(value) in _LEAVES:
            leaves.append(value)
        elif id(value) not in opened:
            opened.add(id(value))
            leaves += value.values() if type(value) is dict else value
    return [leaf for leaf in leaves if type(leaf) in _TENSORS]


def _shallow(value: Any) -> Any:
    return value.copy() if type(value) in (dict, list) else value


def set_attributes(value: Any, held: list[tuple[str, Any]]) -> None:
    """Gives an object these attributes alone, without a setter of the user's.

    Writes only what differs: other threads may read the object.
    """
    now = dict(attributes(value))
    known = layout(type(value))
    slots = dict(known.slots)
    for name in now.keys() - {name for name, _ in held}:
        if name in slots:
            _slot(value, name, slots[name]).__delete__(value)
        else:
            del object.__getattribute__(value, "__dict__")[name]
    for name, each in held:
        if name not in now or now[name] is not each:
            set_attribute(value, name, each)


def set_attribute(value: Any, name: str, each: Any) -> None:
    """Gives an object an attribute, without a setter of the user's."""
    known = layout(type(value))
    slots = dict(known.slots)
    if name in slots:
        _slot(value, name, slots[name]).__set__(value, each)
    elif known.has_dict:
        object.__getattribute__(value, "__dict__")[name] = each


def at(value: Any, path: Path) -> Any:
    """Returns what a value holds at a path now; None where nothing is there."""
    for part in path:
        value = _child(value, part)
        if value is None:
            return None
    return value


def _child(value: Any, part: Part) -> Any:
    kind = type(value)
    if part.style == INDEX and (kind is list or kind is tuple):
        return value[part.value] if part.value < len(value) else None
    if part.style == KEY and kind is dict and type(part.value) is str:
        return value.get(part.value)
    found = _contents(value)
    for style, key, child in () if found is None else found.parts():
        if style == part.style and _is_same_key(key, part.value):
            return child
    return None


def _is_same_key(one: Any, other: Any) -> bool:
    # Other keys may have an __eq__ of the user's.
    return one is other or (type(one) is type(other) in _PLAIN_KEYS and one == other)


def is_container(value: Any) -> bool:
    """Returns True for a tensor, and for what has items: no object with attributes."""
    found = _contents(value)
    return issubclass(type(value), torch.Tensor) or (
        found is not None and (not found.is_object or found.wrapped is not None)
    )


def path_text(path: Iterable[Part]) -> str:
    """Writes a path as a Python expression behind the value's name: `[0].loss['x']`.

    A key that is no plain value is written as its type's name: `['<Vertex>']`.
    """
    return "".join(map(_part_text, path))


def label_text(label: _C.Label) -> str:
    """Writes a label of the recorder's as text, such as `output[0]['logits']`."""
    path = [Part(_STYLES[part.style], part.value) for part in label.parts]
    return f"{label.name}{path_text(path)}"


def entry_label(place: _C.Place) -> str:
    """Writes an entry's label; a gradient's is that of the output it belongs to."""
    return f"{'grad_' * (place.kind == _C.FrameKind.BACKWARD)}{label_text(place.label)}"


def dotted(label: str) -> str:
    """Writes a label with `.x` for each `[x]` and `['x']`, as in patterns."""
    return _BRACKETS.sub(r".\1", label)


_BRACKETS = re.compile(r"""\[['"]?(.*?)['"]?\]""")
_STYLES = {
    _C.LabelStyle.INDEX: INDEX,
    _C.LabelStyle.KEY: KEY,
    _C.LabelStyle.ATTRIBUTE: ATTRIBUTE,
}


def type_name(kind: type) -> str:
    """The qualified name of a type: `collections.OrderedDict`, `set`."""
    module = kind.__module__
    prefix = "" if module in ("builtins", "__main__") else f"{module}."
    return f"{prefix}{kind.__qualname__}"


def _part_text(part: Part) -> str:
    if part.style == ATTRIBUTE:
        name = str(part.value)
        return f".{name}" if name.isidentifier() else f".__dict__[{name!r}]"
    return f"[{plain_key(part.value)!r}]"


def plain_key(key: Any) -> Any:
    """The key if it is plain (a str, an int, or a tuple of them), else `<its type>`."""
    is_tuple = type(key) is tuple
    if all(type(each) in _PLAIN_KEYS for each in (key if is_tuple else (key,))):
        return key
    return f"<{type(key).__name__}>"


_PLAIN_KEYS = (str, int)


# Values without parts. Most values are of one of these exact types.
_PLAIN = frozenset(
    {
        *(int, float, bool, complex, str, bytes, type(None)),
        *(torch.Size, torch.dtype, torch.device),
    }
)
_TENSORS = {torch.Tensor, torch.nn.Parameter}
_LEAVES = _PLAIN | _TENSORS
_BUILTINS = frozenset({tuple, list, dict})
_WITH_ITEMS = (tuple, list, dict, deque, torch.Tensor)
_NEVER_OPENED = (
    *(str, bytes, bytearray, memoryview, int, float, complex, type, enum.Enum),
    *(range, slice, property, staticmethod, classmethod),
    *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType),
    *(types.MethodType, types.MethodWrapperType, types.MethodDescriptorType),
    *(types.CodeType, types.FrameType, types.TracebackType, io.IOBase),
    *(weakref.ReferenceType, weakref.ProxyType, weakref.CallableProxyType),
    *(nn.Module, torch.Generator, torch.Size),
)
_IS_OF_C = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE, which no class statement sets


class TypeLayout(NamedTuple):
    """The ways to look into the objects of a type; refers to no class.

    Attributes:
        is_plain: Its objects have no parts, and are free.
        is_open: Its objects are opened.
        may_hide: Its objects, if they are not opened, may hold tensors.
        has_dict: Its objects may have a dict of attributes.
        slots: The names of its slots, each with the position of its class among the
            bases.
        wraps: The attribute whose dict's items the objects show as theirs, or "".
        is_asked: Code of others lists what its objects without attributes hold.
        is_simple: All that its objects hold stands in their dict.
    """

    is_plain: bool
    is_open: bool
    may_hide: bool
    has_dict: bool
    slots: tuple[tuple[str, int], ...]
    wraps: str
    is_asked: bool
    is_simple: bool


_layouts: weakref.WeakKeyDictionary[type, TypeLayout] = weakref.WeakKeyDictionary()


def layout(kind: type) -> TypeLayout:
    """Returns how objects of a type are looked into; computed once for a type."""
    try:
        return _layouts[kind]
    except KeyError:
        found = _layouts[kind] = _examined(kind)
        return found
    except TypeError:  # a metaclass without a hash
        return _examined(kind)


def _examined(kind: type) -> TypeLayout:
    names = {name for base in kind.__mro__ for name in vars(base)}
    is_closed = issubclass(kind, _NEVER_OPENED) or _is_of_numpy(kind)
    is_partial = issubclass(kind, functools.partial)
    is_open = not is_closed and not is_partial and "__next__" not in names
    has_dict, slots, wraps = _has_dict(kind), tuple(_slots(kind)), _wraps(kind)
    has_others = bool(slots or wraps) or issubclass(kind, _WITH_ITEMS)
    return TypeLayout(
        is_plain=kind in _PLAIN,
        is_open=is_open,
        may_hide=not is_closed and kind not in _PLAIN,
        has_dict=has_dict,
        slots=slots,
        wraps=wraps,
        is_simple=is_open and has_dict and not has_others,
        is_asked=kind in pytree.SUPPORTED_NODES or issubclass(kind, Mapping),
    )


def _is_of_numpy(kind: type) -> bool:
    names = {(base.__module__, base.__name__) for base in kind.__mro__}
    return not names.isdisjoint({("numpy", "ndarray"), ("numpy", "generic")})


def _has_dict(kind: type) -> bool:
    found = (vars(base).get("__dict__") for base in kind.__mro__)
    first = next((each for each in found if each is not None), None)
    # Else there is none, or a property of the user's.
    return isinstance(first, (types.GetSetDescriptorType, types.MemberDescriptorType))


def _slots(kind: type) -> Iterable[tuple[str, int]]:
    """Yields the slots of the classes written in Python, those of bases first."""
    for place, base in reversed(list(enumerate(kind.__mro__))):
        if "__slots__" in vars(base):
            for name, found in vars(base).items():
                if isinstance(found, types.MemberDescriptorType):
                    yield name, place


def _wraps(kind: type) -> str:
    """The attribute that a Mapping's `__getitem__` reads, and nothing else."""
    if not issubclass(kind, Mapping) or issubclass(kind, dict):
        return ""
    if issubclass(kind, UserDict):
        return "data"
    for base in kind.__mro__:
        if "__getitem__" in vars(base):
            code = getattr(vars(base)["__getitem__"], "__code__", None)
            if code is not None and code.co_code == _READS_ONE.co_code:
                return str(code.co_names[0])
            return ""
    return ""


_READS_ONE = (lambda self, key: self.attribute[key]).__code__


class _Contents(NamedTuple):
    """The parts of a value.

    Attributes:
        styles: The styles of the parts.
        keys: The indices, keys or names.
        values: What is there.
        wrapped: The dict whose items are shown as the value's own.
        is_object: The attributes of an object.
        beside: The attributes of a container, which are not among the parts above.
    """

    styles: Iterable[Style]
    keys: Iterable[Any]
    values: list[Any] | tuple[Any, ...]
    wrapped: dict[Any, Any] | None = None
    is_object: bool = False
    beside: _Contents | None = None

    def parts(self) -> Iterator[tuple[Style, Any, Any]]:
        """Yields the style, the key and the value of each part."""
        own = zip(self.styles, self.keys, self.values, strict=False)  # styles: endless
        return own if self.beside is None else itertools.chain(own, self.beside.parts())

    def groups(self) -> tuple[_Contents, ...]:
        """The parts as one: of an object, or not; or as two."""
        if self.beside is None:
            return (self,)
        return self._replace(beside=None), self.beside


def _contents(value: Any) -> _Contents | None:
    kind = type(value)
    if kind is dict:
        return _keyed(list(value.items()), KEY)
    if kind is tuple or kind is list:
        return _indexed(value[:])
    if kind in _PLAIN or issubclass(kind, torch.Tensor):
        return None
    if issubclass(kind, tuple):
        if kind is torch.Size:
            return None
        return _with_attributes(value, _indexed(tuple.__getitem__(value, slice(None))))
    if issubclass(kind, list):
        return _with_attributes(value, _indexed(list.__getitem__(value, slice(None))))
    if issubclass(kind, dict):
        items = items_of(value)
        is_model_output = kind is not dict and _is_dataclass(kind)
        found = _keyed(items, ATTRIBUTE if is_model_output else KEY)
        return _with_attributes(value, found)
    if issubclass(kind, deque):
        return _with_attributes(value, _indexed(list(deque.__iter__(value))))
    known = layout(kind)
    if not known.is_open:
        return None
    own = attributes(value)
    if own:
        return _of_object(own, known.wraps)
    return _registered(value, kind) if known.is_asked else None


def _indexed(values: list[Any] | tuple[Any, ...]) -> _Contents:
    return _Contents(itertools.repeat(INDEX), range(len(values)), values)


def _keyed(items: list[tuple[Any, Any]], style: Style) -> _Contents:
    keys, values = [key for key, _ in items], [child for _, child in items]
    return _Contents(itertools.repeat(style), keys, values)


def _with_attributes(value: Any, found: _Contents) -> _Contents:
    """Adds the attributes of a container that are not plain, nor its items."""
    own = [(key, each) for key, each in attributes(value) if type(each) not in _PLAIN]
    if own and issubclass(type(value), dict):  # as a ModelOutput's
        own = [(key, each) for key, each in own if dict.get(value, key) is not each]
    if not own:
        return found
    return found._replace(beside=_keyed(own, ATTRIBUTE)._replace(is_object=True))


def items_of(value: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Lists the items of a dict, by the methods of the builtin types."""
    is_ordered = issubclass(type(value), OrderedDict)
    return list((OrderedDict if is_ordered else dict).items(value))


def _is_dataclass(kind: type) -> bool:
    return any("__dataclass_fields__" in vars(base) for base in kind.__mro__)


def attributes(value: Any) -> list[tuple[str, Any]]:
    """Lists what an object itself holds in attributes and slots, also of a container.

    Runs none of the user's code.
    """
    known = layout(type(value))
    own = object.__getattribute__(value, "__dict__") if known.has_dict else None
    found = list(own.items()) if type(own) is dict else []
    for name, place in known.slots:
        with contextlib.suppress(AttributeError, KeyError):
            found.append((name, _slot(value, name, place).__get__(value)))
    return found


def _slot(value: Any, name: str, place: int) -> Any:
    return vars(type(value).__mro__[place])[name]


def _of_object(own: list[tuple[str, Any]], wraps: str) -> _Contents:
    wrapped: Any = dict(own).get(wraps) if wraps else None
    if not issubclass(type(wrapped), dict):
        found = _keyed(own, ATTRIBUTE)
        return found._replace(is_object=True)
    items = items_of(wrapped)
    rest = [(name, each) for name, each in own if name != wraps]
    return _Contents(
        itertools.chain(itertools.repeat(KEY, len(items)), itertools.repeat(ATTRIBUTE)),
        [key for key, _ in items + rest],
        [child for _, child in items + rest],
        wrapped,
        is_object=True,
    )


def _registered(value: Any, kind: type) -> _Contents | None:
    """Lists what an object without attributes declares as its parts."""
    try:
        if kind in pytree.SUPPORTED_NODES:
            return _indexed(pytree.SUPPORTED_NODES[kind].flatten_fn(value)[0])
        return _keyed(list(value.items()), KEY)
    except Exception:
        return None


class Walk:
    """One walk over one value or several, whose shared parts are opened once.

    Args:
        kinds: The types to find.
        depth: The number of nested containers that are opened.
        most: The number of values that are visited.
        remembers_holders: Keep what `holders_of()` needs.
        objects: The number of objects that are opened.

    Attributes:
        values: The values of these types.
        opaque: What was not opened and may hold more: its path and its type.
        opened: The containers that were opened, by their ids: each id is one of them.
        lists: The ids of lists and dicts that no object holds.
        of_objects: The ids of values found that an object holds.
        leaves: The types of the values without parts that were met.
        opens_barren: Objects that lead to plain values alone are opened, too.
    """

    opens_barren = False

    def __init__(
        self,
        kinds: tuple[type, ...],
        depth: int = MAX_DEPTH,
        most: int = MAX_VALUES,
        remembers_holders: bool = False,
        objects: int = MAX_VALUES,
    ) -> None:
        self.values: list[Any] = []
        self._spots: list[_Spot] = []  # where the values are
        self.leaves: set[type] = set()
        self.opaque: list[tuple[Path, type]] = []
        self._unknown: list[tuple[_Spot, type]] = []
        self.lists: set[int] = set()
        self._kinds = kinds
        self._skipped = _skipped_for(kinds)
        self._is_for_tensors = torch.Tensor in kinds
        self._depth = depth
        self._num_left = most
        self._num_left_of_objects = MAX_VALUES_OF_OBJECTS
        self._num_left_to_open = objects
        self.opened: dict[int, Any] = {}
        self.of_objects: set[int] = set()
        self._holders: dict[int, list[int]] | None = {} if remembers_holders else None

    def visit(self, value: Any) -> None:
        """Lists what a value holds."""
        self._visit(value, (), 0, False)

    def visit_call(self, args: Any, kwargs: Any) -> None:
        """Lists what a call is given; a keyword is written as an attribute."""
        for i, value in enumerate(args):
            self._visit(value, ((), INDEX, i), 0, False)
        for name, value in kwargs.items():
            self._visit(value, ((), ATTRIBUTE, name), 0, False)

    @property
    def found(self) -> list[tuple[Path, Any]]:
        """The values of these types, with their paths."""
        return list(zip(map(_path_of, self._spots), self.values, strict=True))

    @property
    def unknown(self) -> list[tuple[Path, type]]:
        """Values that are never opened, and objects in which nothing was found.

        Not objects with declared fields, nor what other objects hold.
        """
        return [(_path_of(spot), kind) for spot, kind in self._unknown]

    def unknown_roots(self, harmless: tuple[type, ...]) -> list[Path]:
        """The path of the first of `unknown` in each of the values visited.

        Args:
            harmless: Types that are left out.
        """
        found: list[Path] = []
        last: object = None
        for spot, kind in self._unknown:
            if not issubclass(kind, harmless):
                root = _root_of(spot)
                if root is not last:
                    found.append(_path_of(spot))
                last = root
        return found

    def holders_of(self, of: set[int]) -> set[int]:
        """The ids of the containers that hold one of some values, however deep."""
        assert self._holders is not None
        found, waiting = set[int](), list(of)
        while waiting:
            for holder in self._holders.get(waiting.pop(), ()):
                if holder not in found:
                    found.add(holder)
                    waiting.append(holder)
        return found

    def _visit(self, value: Any, spot: _Spot, depth: int, is_of_object: bool) -> None:
        kind = type(value)
        if kind in self._skipped:
            self.leaves.add(kind)
            return
        if id(value) in self.opened:
            return
        if issubclass(kind, self._kinds):
            self._add(value, spot)
            if is_of_object:
                self.of_objects.add(id(value))
            return
        if kind not in _BUILTINS and issubclass(kind, torch.Tensor):
            return  # among other types that are looked for
        contents = _contents(value)
        if contents is None:
            self.leaves.add(kind)
            if _hides(value):
                self.opaque.append((_path_of(spot), kind))
            elif not is_of_object:
                self._unknown.append((spot, kind))
            return
        if depth >= self._depth:
            if any(type(child) not in _PLAIN for _, _, child in contents.parts()):
                self.opaque.append((_path_of(spot), kind))
            return
        num_found = len(self.values)
        if self._opens(value, contents, is_of_object):
            for own in contents.groups():
                self._visit_all(value, own, spot, depth + 1, is_of_object)
        is_silent = contents.is_object and len(self.values) == num_found
        if is_silent and not is_of_object and not is_declared(value):
            self._unknown.append((spot, kind))

    def _num_barren(self, value: Any, depth: int = _BARREN_DEPTH) -> int:
        """The number of values below an object that leads to plain ones alone.

        -1 if it may lead to others. A batch may hold many thousands of such objects,
        and is walked through in each step.
        """
        kind = type(value)
        if kind is tuple or kind is list:
            held = value
        elif kind is dict:
            held = value.values()
        elif layout(kind).is_simple:
            own = object.__getattribute__(value, "__dict__")
            held = own.values() if type(own) is dict and own else None
        else:
            return -1
        if held is None or len(held) > _FEW:
            return -1
        kinds, number = set(map(type, held)), 0
        if not kinds <= self._skipped:
            for each in held if depth else ():
                if type(each) not in self._skipped:
                    below = self._num_barren(each, depth - 1)
                    if below < 0:
                        return -1
                    number += 1 + below
            if not depth:
                return -1
        self.leaves |= kinds & self._skipped
        return number

    def _skips_barren(self, value: Any, spot: _Spot, is_of_object: bool) -> bool:
        """Passes over an object that leads to plain values alone, as if visited."""
        number = self._num_barren(value)
        if number < 0 or number > min(self._num_left, self._num_left_of_objects):
            return False
        self._num_left -= number
        self._num_left_of_objects -= number
        if not is_of_object and not is_declared(value):
            self._unknown.append((spot, type(value)))
        return True

    def _add(self, value: Any, spot: _Spot) -> None:
        self.values.append(value)
        self._spots.append(spot)

    def _opens(self, value: Any, contents: _Contents, is_of_object: bool) -> bool:
        """Marks a container as opened. Returns False if what it wraps was, before."""
        self.opened[id(value)] = value
        if not is_of_object and type(value) in (list, dict):
            self.lists.add(id(value))
        wrapped = contents.wrapped
        if wrapped is None:
            return True
        if self._holders is not None:
            self._holders.setdefault(id(wrapped), []).append(id(value))
        if id(wrapped) in self.opened:
            return False
        self.opened[id(wrapped)] = wrapped
        return True

    def _visit_all(
        self,
        holder: Any,
        contents: _Contents,
        spot: _Spot,
        depth: int,
        is_of_object: bool,
    ) -> None:
        is_of_object = is_of_object or contents.is_object
        wrapped, is_for_tensors = contents.wrapped, self._is_for_tensors
        holders, skipped = self._holders, self._skipped
        for style, key, child in contents.parts():
            kind = type(child)
            if kind in skipped:
                self.leaves.add(kind)
                continue
            self._num_left -= 1
            self._num_left_of_objects -= is_of_object
            there = (spot, style, key)
            if self._num_left < 0 or (is_of_object and self._num_left_of_objects < 0):
                self.opaque.append((_path_of(there), kind))
                return
            if holders is not None:
                is_item = wrapped is not None and style == KEY
                by = id(wrapped) if is_item else id(holder)
                holders.setdefault(id(child), []).append(by)
            if kind is torch.Tensor and not is_of_object:  # most values
                if is_for_tensors:
                    self._add(child, there)
                continue
            if kind not in _BUILTINS and not issubclass(kind, self._kinds):
                self._num_left_to_open -= 1
                if self._num_left_to_open < 0:
                    self.opaque.append((_path_of(there), kind))
                    return
                is_deep = depth + _BARREN_DEPTH >= self._depth  # what is not opened
                passes = not is_deep and not self.opens_barren
                if passes and self._skips_barren(child, there, is_of_object):
                    continue
            self._visit(child, there, depth, is_of_object)


@functools.cache
def _skipped_for(kinds: tuple[type, ...]) -> frozenset[object]:
    return _PLAIN - set(kinds)


# Where a value is: the spot of what holds it, the style and the key; () for the root.
# Most paths are never asked for.
_Spot = tuple[Any, ...]


def _path_of(spot: _Spot) -> Path:
    parts = []
    while spot:
        spot, style, key = spot
        parts.append(Part(style, key))
    return tuple(reversed(parts))


def _root_of(spot: _Spot) -> _Spot:
    """The first part of a path."""
    while spot[0]:
        spot = spot[0]
    return spot


def _hides(value: Any) -> bool:
    """True for a value that is not opened and may hold tensors."""
    known = layout(type(value))
    if not known.may_hide:
        return False
    if known.is_asked:
        return True  # its own code has raised
    found = gc.get_referents(value)
    # An object without attributes refers to an empty dict.
    return any(layout(type(e)).may_hide for e in found if type(e) is not dict or e)


def is_declared(value: Any) -> bool:
    """True for dataclasses, attrs classes and wrappers of dicts."""
    kind = type(value)
    is_class = hasattr(kind, "__dataclass_fields__") or hasattr(kind, "__attrs_attrs__")
    is_object = is_class and not isinstance(value, (type, nn.Module))
    return is_object or isinstance(value, UserDict)


class Rebuilding:
    """Copies the containers of a value that hold something replaced; see `mapped()`.

    Args:
        value: The value.
        change: Returns the substitute of each value of some types.
        depth: The number of nested containers that are opened.
        kinds: The types.
        anew: Copy other containers, too.
        is_strict: Raise where a container cannot be copied; else it stays as it is.
        objects: The number of objects that are opened.
        has_empty: With `anew`, also objects without a tensor, such as a new cache.

    Attributes:
        walk: The walk over the value, which keeps its parts alive.
    """

    def __init__(
        self,
        value: Any,
        change: Callable[[Any], Any],
        depth: int,
        kinds: tuple[type, ...],
        anew: bool = False,
        is_strict: bool = True,
        objects: int = MAX_VALUES,
        has_empty: bool = False,
    ) -> None:
        self.walk = walk = Walk(kinds, depth, remembers_holders=True, objects=objects)
        walk.opens_barren = has_empty
        walk.visit(value)
        found = {id(each): each for each in walk.values}
        self._new = {key: change(each) for key, each in found.items()}
        self._changed = {
            k: each for k, each in found.items() if self._new[k] is not each
        }
        holders = walk.holders_of(set(self._changed))
        self._must = holders if is_strict else set[int]()
        self._to_copy = set(holders)
        if anew:
            self._to_copy = walk.holders_of({*found, *walk.lists}) | walk.lists
            self._to_copy |= walk.opened.keys() if has_empty else set()

    def copied(self) -> Iterator[tuple[Any, Any]]:
        """Yields all that was replaced or copied, with what stands for it."""
        for key, each in [*self._changed.items(), *self.walk.opened.items()]:
            if self._new.get(key, each) is not each:
                yield each, self._new[key]

    def of(self, value: Any) -> Any:
        """Returns the copy of a value, or the value."""
        if id(value) in self._new:
            return self._new[id(value)]
        if type(value) is weakref.ref and id(value()) in self._to_copy:
            return weakref.ref(self.of(value()))
        if id(value) not in self._to_copy:
            return value
        kind = type(value)
        try:
            if kind in _BUILTINS:
                return self._builtin(value, kind)
            copy = self._copy(value, kind)
        except (TypeError, AttributeError) as error:
            if isinstance(error, NotRebuilt):
                raise
            if id(value) not in self._must:
                self._new.pop(id(value), None)
                self._to_copy.discard(id(value))
                return value
            raise NotRebuilt(f"cannot rebuild {type_name(kind)}: {error}") from error
        return self._new.setdefault(id(value), copy)

    def _builtin(self, value: Any, kind: type) -> Any:
        copy: Any
        if kind is tuple:
            copy = tuple(map(self.of, value))
            return self._new.setdefault(id(value), copy)  # a cycle may have led to it
        copy = self._new[id(value)] = kind()
        if kind is dict:
            for key, child in list(value.items()):
                copy[key] = self.of(child)
        else:
            copy.extend(map(self.of, value[:]))
        return copy

    def _copy(self, value: Any, kind: type) -> Any:
        if issubclass(kind, tuple):
            return self._tuple(value, kind)
        copy: Any
        if issubclass(kind, list):
            copy = self._begun(value, kind)
            list.extend(copy, map(self.of, list.__getitem__(value, slice(None))))
        elif issubclass(kind, deque):
            copy = self._begun(value, kind)
            items = list(deque.__iter__(value))
            deque.__init__(copy, map(self.of, items), value.maxlen)
        elif issubclass(kind, dict):
            copy = self._dict(value, kind)
        elif attributes(value):
            copy = self._begun(value, kind)
        else:
            return self._of_registered(value, kind)
        self._fill(copy, value)
        return copy

    def _begun(self, value: Any, kind: type) -> Any:
        """An empty object of the same type, which cycles refer to from now on."""
        copy = solid_base(kind).__new__(kind)
        self._new[id(value)] = copy
        return copy

    def _dict(self, value: Any, kind: type) -> Any:
        base = solid_base(kind)
        copy: Any = self._begun(value, kind)
        if hasattr(base, "default_factory"):
            base.default_factory.__set__(copy, base.default_factory.__get__(value))
        for key, child in items_of(value):
            base.__setitem__(copy, key, self.of(child))
        return copy

    def _tuple(self, value: Any, kind: type) -> Any:
        items = [self.of(each) for each in tuple.__iter__(value)]
        if id(value) in self._new:  # a cycle has led to it
            return self._new[id(value)]
        if hasattr(kind, "n_sequence_fields"):  # torch.return_types
            return kind(items)
        copy: Any = tuple.__new__(kind, items)
        self._fill(copy, value)
        return copy

    def _of_registered(self, value: Any, kind: type) -> Any:
        if kind in pytree.SUPPORTED_NODES:
            node = pytree.SUPPORTED_NODES[kind]
            values, context = node.flatten_fn(value)
            return node.unflatten_fn([self.of(each) for each in values], context)
        return kind({key: self.of(each) for key, each in value.items()})

    def _fill(self, copy: Any, value: Any) -> None:
        """Gives a copy the attributes of an object, without a setter of the user's."""
        for name, child in attributes(value):
            set_attribute(copy, name, self.of(child))


def solid_base(kind: type) -> Any:
    """The first of a type's bases that is written in C."""
    return next(base for base in kind.__mro__ if base.__flags__ & _IS_OF_C)
