"""Values of each kind that can hold a tensor, for tests of all that looks into them."""

import collections
import dataclasses
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import attrs
import torch.utils._pytree as pytree
from hypothesis import reject
from hypothesis import strategies as st
from torch import nn
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import ModelOutput


class Pair(NamedTuple):
    x: Any
    rest: Any = None


@dataclass
class Plain:
    x: Any


@dataclass(frozen=True)
class Frozen:
    x: Any


@dataclass(slots=True)
class Slotted:
    x: Any


@dataclass(frozen=True, slots=True)
class FrozenSlotted:
    x: Any


@dataclass
class Inherited(Plain):
    y: Any = None


@dataclass(slots=True)
class InheritedSlots(Slotted):
    y: Any = None


class Broken(Mapping):
    """Raises, whatever is asked of it."""

    __slots__ = ()

    def __getitem__(self, key):
        raise RuntimeError

    __iter__ = __len__ = items = __getitem__


@dataclass
class WithPostInit:
    """Cannot be made anew by its constructor from its own fields."""

    raw: dataclasses.InitVar[Any]
    x: Any = dataclasses.field(init=False)

    def __post_init__(self, raw):
        self.x = raw


@dataclass
class Output(ModelOutput):
    x: Any = None


@attrs.mutable(slots=False)
class AttrsPlain:
    x: Any


@attrs.frozen(slots=False)
class AttrsFrozen:
    x: Any


@attrs.define
class AttrsSlots:
    x: Any


@attrs.frozen
class AttrsFrozenSlots:
    x: Any


class OwnDict(collections.UserDict):
    pass


class Wrapper(Mapping):
    """A mapping that hands on to one dict."""

    def __init__(self, **items):
        self._items = items

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class Renaming(Wrapper):
    """A mapping whose keys are not those that it holds."""

    def __getitem__(self, key):
        return self._items[key.removeprefix("my_")]

    def __iter__(self):
        return iter(f"my_{key}" for key in self._items)


class Registered:
    """A type that torch's pytree knows."""

    def __init__(self, x):
        self.hidden = x


pytree.register_pytree_node(
    Registered, lambda value: ([value.hidden], None), lambda x, _: Registered(*x)
)


class OnlyRegistered:
    """Holds its tensor where only its registration finds it."""

    __slots__ = ()
    held: ClassVar[dict] = {}

    def __new__(cls, x):
        made = object.__new__(cls)
        cls.held[id(made)] = x
        return made


pytree.register_pytree_node(
    OnlyRegistered,
    lambda value: ([OnlyRegistered.held[id(value)]], None),
    lambda x, _: OnlyRegistered(*x),
)


class Object:
    """As detectron2's Instances: properties and __getattr__ are never run."""

    def __init__(self, x):
        self.x = x

    @property
    def computed(self):
        raise AssertionError("a property ran")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise AssertionError("__getattr__ ran")


class SlotsObject:
    __slots__ = ("__weakref__", "unset", "x")

    def __init__(self, x):
        self.x = x


class OwnList(list):
    def __iter__(self):
        raise AssertionError("an overridden method ran")


class Cyclic:
    def __init__(self, x):
        self.me = self
        self.parts = [self, x]


class Storage(collections.abc.MutableMapping):
    """As torch_geometric's: holds a mapping and a weak reference to its batch."""

    def __init__(self, parent, mapping):
        self._mapping = mapping
        self._parent = weakref.ref(parent)

    def __getitem__(self, key):
        return self._mapping[key]

    def __setitem__(self, key, value):
        self._mapping[key] = value

    def __delitem__(self, key):
        del self._mapping[key]

    def __iter__(self):
        return iter(self._mapping)

    def __len__(self):
        return len(self._mapping)


class GraphLike:
    def __init__(self, x):
        self.__dict__["_store"] = Storage(self, {"x": x})

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._store[name]


def graph(x):
    from torch_geometric.data import Data  # takes seconds

    return Data(x=x)


class Container(NamedTuple):
    """A kind of value.

    Attributes:
        make: Puts a tensor into one.
        get: Gets the tensor of one, as a program does.
        path: Where the tensor is, as an expression.
    """

    make: Callable[[Any], Any]
    get: Callable[[Any], Any]
    path: str


def _item(value):
    return value["x"]


def _attribute(value):
    return value.x


def _nested(depth):
    def make(x):
        for level in range(depth):
            x = [x] if level % 2 else {"x": x}
        return x

    def get(value):
        for level in reversed(range(depth)):
            value = value[0] if level % 2 else value["x"]
        return value

    levels = reversed(range(depth))
    return Container(make, get, "".join("[0]" if i % 2 else "['x']" for i in levels))


class OwnPair(Pair):
    """A named tuple with attributes of its own."""


def _beside(container):
    """A container that holds a tensor in an attribute, and not among its items."""

    def make(x):
        value = container()
        object.__setattr__(value, "x", x)
        return value

    return Container(make, _attribute, ".x")


def _defaultdict(x):
    return collections.defaultdict(list, x=x)


CONTAINERS = {
    "tuple": Container(lambda x: (x, 3), lambda v: v[0], "[0]"),
    "list": Container(lambda x: [x, None], lambda v: v[0], "[0]"),
    "own list": Container(
        lambda x: OwnList([x]), lambda v: list.__getitem__(v, 0), "[0]"
    ),
    "deque": Container(lambda x: collections.deque([x]), lambda v: v[0], "[0]"),
    "namedtuple": Container(Pair, _attribute, "[0]"),
    "dict": Container(lambda x: {"x": x, "n": 1}, _item, "['x']"),
    "OrderedDict": Container(lambda x: collections.OrderedDict(x=x), _item, "['x']"),
    "defaultdict": Container(_defaultdict, _item, "['x']"),
    "UserDict": Container(lambda x: OwnDict(x=x), _item, "['x']"),
    "Mapping": Container(lambda x: Wrapper(x=x), _item, "['x']"),
    "renaming Mapping": Container(
        lambda x: Renaming(x=x), lambda v: v["my_x"], "._items['x']"
    ),
    "mappingproxy": Container(
        lambda x: types.MappingProxyType({"x": x}), _item, "['x']"
    ),
    "dataclass": Container(Plain, _attribute, ".x"),
    "frozen dataclass": Container(Frozen, _attribute, ".x"),
    "slots dataclass": Container(Slotted, _attribute, ".x"),
    "frozen slots dataclass": Container(FrozenSlotted, _attribute, ".x"),
    "inherited dataclass": Container(Inherited, _attribute, ".x"),
    "inherited slots dataclass": Container(InheritedSlots, _attribute, ".x"),
    "dataclass with __post_init__": Container(WithPostInit, _attribute, ".x"),
    "ModelOutput": Container(lambda x: Output(x=x), _attribute, ".x"),
    "CausalLMOutput": Container(
        lambda x: CausalLMOutput(logits=x), lambda v: v.logits, ".logits"
    ),
    "BatchEncoding": Container(lambda x: BatchEncoding({"x": x}), _item, "['x']"),
    "attrs": Container(AttrsPlain, _attribute, ".x"),
    "frozen attrs": Container(AttrsFrozen, _attribute, ".x"),
    "slots attrs": Container(AttrsSlots, _attribute, ".x"),
    "frozen slots attrs": Container(AttrsFrozenSlots, _attribute, ".x"),
    "registered": Container(Registered, lambda v: v.hidden, ".hidden"),
    "only registered": Container(
        OnlyRegistered, lambda v: OnlyRegistered.held[id(v)], "[0]"
    ),
    "beside a list": _beside(OwnList),
    "beside a named tuple": Container(
        lambda x: setattr(value := OwnPair(1), "y", x) or value, lambda v: v.y, ".y"
    ),
    "beside a dict": _beside(collections.OrderedDict),
    "beside a deque": _beside(type("OwnDeque", (collections.deque,), {})),
    "beside a ModelOutput": Container(
        lambda x: object.__setattr__(value := Output(x=1), "y", x) or value,
        lambda v: v.y,
        ".y",
    ),
    "object": Container(Object, _attribute, ".x"),
    "slots object": Container(SlotsObject, _attribute, ".x"),
    "namespace": Container(lambda x: types.SimpleNamespace(x=x), _attribute, ".x"),
    "like a graph": Container(GraphLike, _attribute, "._store['x']"),
    "graph": Container(graph, _attribute, "._store['x']"),
    "nested 6": _nested(6),
    "nested 15": _nested(15),
    "cyclic": Container(Cyclic, lambda v: v.parts[1], ".parts[1]"),
    "shared": Container(lambda x: [part := [x], part], lambda v: v[1][0], "[0][0]"),
}

# One for each way to read and to rebuild a value, for what tests/base/test_tree.py
# does not ask: that all of it reads and rebuilds values as the tree does.
FEW = ("namedtuple", "Mapping", "frozen slots dataclass", "only registered")
FEW += ("object", "nested 15")


class Block(nn.Module):
    """Takes and returns a container."""

    def __init__(self, kind, scale=1.0):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.container = CONTAINERS[kind]
        self.scale = scale

    def forward(self, given):
        self.seen = self.container.get(given).dtype
        made = self.lin(self.container.get(given)) * self.scale
        return self.container.make(made)


class Model(nn.Module):
    """Hands a container on to its block, and takes one back."""

    def __init__(self, kind, scale=1.0):
        super().__init__()
        self.block = Block(kind, scale)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        container = self.block.container
        return self.head(container.get(self.block(container.make(x)))).sum()


def _container(make, value):
    """A container of a value; ModelOutput refuses lists that look like its keys."""
    try:
        return make(value)
    except ValueError as error:
        if not str(error).startswith("Cannot set key/value"):
            raise
        reject()


def nested_values(leaves, makers):
    """A strategy of values nested at random, some of their parts shared.

    Args:
        leaves: A strategy of the innermost values.
        makers: Functions that make a container of a value.
    """
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3),
            st.builds(_container, st.sampled_from(makers), inner),
            inner.map(lambda value: [value, value]),
            inner.map(lambda value: (value, [value])),
        ),
        max_leaves=8,
    )
