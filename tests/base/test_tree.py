"""The walk over nested values: what it lists, what it rebuilds, what it leaves out."""

import collections
import copy
import dataclasses
import datetime
import functools
import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from containers import (
    CONTAINERS,
    Broken,
    Cyclic,
    GraphLike,
    Object,
    Output,
    OwnDict,
    Plain,
    Wrapper,
    nested_values,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from overflow_fast.base import tree

KINDS = pytest.mark.parametrize("kind", CONTAINERS)


def x():
    return torch.ones(3)


def paths(value, **options):
    return [tree.path_text(path) for path, _ in tree.tensors(value, **options)]


@KINDS
def test_a_tensor_is_found_in_each_kind_of_container(kind):
    tensor, container = x(), CONTAINERS[kind]
    value = container.make(tensor)
    [(path, found)] = tree.tensors(value)
    assert found is tensor
    assert tree.path_text(path) == container.path
    assert tree.at(value, path) is tensor
    if kind != "only registered":
        assert eval(f"value{container.path}") is tensor
    assert tree.opaque(value) == {}


@KINDS
def test_each_kind_of_container_is_rebuilt_and_left_alone(kind):
    tensor, other, container = x(), x(), CONTAINERS[kind]
    value = container.make(tensor)
    changed = tree.mapped(value, lambda each: other)
    assert type(changed) is type(value)
    assert changed is not value
    assert container.get(changed) is other
    assert container.get(value) is tensor
    assert [found for _, found in tree.tensors(changed)] == [other]
    assert tree.mapped(value, lambda each: each) is value


@pytest.mark.parametrize("kind", sorted(set(CONTAINERS) - {"nested 15"}))
def test_containers_within_containers(kind):
    container = CONTAINERS[kind]
    tensors = [x() for _ in range(3)]
    value = [container.make(tensors[0]), {"a": (container.make(tensors[1]),)}]
    value.append(CONTAINERS["dataclass"].make(container.make(tensors[2])))
    assert list(map(id, (each for _, each in tree.tensors(value)))) == list(
        map(id, tensors)
    )
    changed = tree.mapped(value, lambda each: each + 1)
    assert all(bool((each == 2).all()) for _, each in tree.tensors(changed))
    assert len(tree.tensors(changed)) == 3
    assert all(bool((each == 1).all()) for each in tensors)


def test_a_tensor_alone_has_the_empty_path():
    tensor = x()
    assert tree.tensors(tensor) == [((), tensor)]
    assert tree.mapped(tensor, torch.neg).tolist() == [-1, -1, -1]
    assert tree.path_text(()) == ""


@pytest.mark.parametrize(
    "leaf",
    [
        *(None, 1, 1.5, True, 2j, "text", b"bytes", torch.float16, torch.Size([2])),
        *(torch.device("cpu"), torch.Generator(), nn.Linear(1, 1), len, type, torch),
        *(lambda: 0, st.integers, range(3), threading.Lock(), weakref.ref(Plain)),
        *(st, Plain, Plain(1).__init__, slice(2), NotImplemented, tree.INDEX),
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_leaves_are_not_opened(leaf):
    assert tree.children(leaf) is None
    assert tree.tensors(leaf) == []
    assert tree.opaque([leaf]) == {}
    assert tree.mapped(leaf, torch.neg) is leaf


def test_arrays_of_numpy_are_not_opened(tmp_path):
    numpy = pytest.importorskip("numpy")
    array = numpy.memmap(tmp_path / "array", mode="w+", shape=3)
    for leaf in (numpy.ones(3), numpy.float32(1), array):
        assert tree.children(leaf) is None
        assert tree.opaque([leaf]) == {}


def test_children_are_listed_with_plain_values():
    tensor = x()
    value = Plain({"n": 1, 2: tensor})
    [(part, items)] = tree.children(value)
    assert part == tree.Part("attribute", "x")
    assert tree.children(items) == [
        (tree.Part("key", "n"), 1),
        (tree.Part("key", 2), tensor),
    ]
    assert tree.children([4]) == [(tree.Part("index", 0), 4)]
    assert tree.children(()) == []
    assert tree.children(OwnDict(a=1)) == [(tree.Part("key", "a"), 1)]


def test_a_tensor_is_listed_at_each_place_and_a_container_once():
    tensor = x()
    assert paths([tensor, tensor, {"q": tensor}]) == ["[0]", "[1]", "[2]['q']"]
    shared = [tensor]
    assert paths({"a": shared, "b": (shared,)}) == ["['a'][0]"]
    wrapper = OwnDict(a=tensor)
    assert paths([wrapper.data, wrapper]) == ["[0]['a']"]
    assert paths([wrapper, wrapper.data]) == ["[0]['a']"]


def test_an_attribute_that_is_an_item_is_listed_once():
    both, other = x(), x()
    output = Output(x=both)
    assert vars(output)["x"] is both
    assert paths(output) == [".x"]
    own = type("OwnList", (list,), {})([both])
    own.first, own.second = both, other
    assert paths(own) == ["[0]", ".first", ".second"]


def test_paths_are_expressions_and_keys_that_are_no_plain_values_are_named_by_type():
    value = {"it's": x(), 0: x(), ("a", 1): x(), (1.5,): x(), 2.5: x(), Plain: x()}
    assert paths(value) == [
        *("""["it's"]""", "[0]", "[('a', 1)]", "['<tuple>']", "['<float>']"),
        "['<type>']",
    ]
    odd = Plain(None)
    odd.__dict__["no name"] = x()
    assert paths(odd) == [".__dict__['no name']"]


def test_what_is_gone_is_none():
    value = {"a": [x()], "b": Object(x())}
    first, second = (path for path, _ in tree.tensors(value))
    value["a"].clear()
    del value["b"].x
    assert tree.at(value, first) is None
    assert tree.at(value, second) is None
    assert tree.at(3, first) is None


def test_attributes_are_read_without_code_of_the_class():
    class Loud:
        y = torch.ones(1)  # of the class: not held

        def __init__(self):
            self.x = torch.ones(1)

        def __getattribute__(self, name):
            raise AssertionError

        @property
        def z(self):
            raise AssertionError

    value = Loud()
    assert paths(value) == [".x"]
    found = dict(tree.attributes(value))
    assert isinstance(found["x"], torch.Tensor) and not {"y", "z"} & found.keys()


def test_dicts_and_lists_are_read_without_code_of_the_class():
    class Loud(dict):
        def items(self):
            raise AssertionError

        __iter__ = keys = __getitem__ = items

    class LoudTuple(tuple):
        def __iter__(self):
            raise AssertionError

        __getitem__ = __len__ = __iter__

    value = Loud(a=LoudTuple([x()]))
    assert paths(value) == ["['a'][0]"]
    changed = tree.mapped(value, torch.neg)
    assert [each.tolist() for _, each in tree.tensors(changed)] == [[-1, -1, -1]]


def test_a_mapping_is_read_by_what_it_holds():
    class Lazy(collections.abc.Mapping):
        """Computes its values: none of these is a tensor of the program."""

        def __init__(self):
            self.source = x()

        def __getitem__(self, key):
            raise AssertionError

        __iter__ = __len__ = __getitem__

    assert paths(Lazy()) == [".source"]


def nest(depth, innermost):
    for _ in range(depth):
        innermost = [innermost]
    return innermost


def test_sixteen_containers_are_opened():
    assert paths(nest(16, x())) == ["[0]" * 16]
    assert paths(nest(17, x())) == []
    assert tree.opaque(nest(17, x())) == {"list": 1}
    assert tree.opaque(nest(17, 3)) == {}
    assert paths(nest(17, x()), depth=tree.CALL_DEPTH) == ["[0]" * 17]
    too_deep = nest(17, x())
    assert tree.mapped(too_deep, torch.neg) is too_deep


@pytest.mark.parametrize(
    ("hiding", "name"),
    [
        (lambda t: {t}, "set"),
        (lambda t: frozenset([t]), "frozenset"),
        (lambda t: iter([t]), "list_iterator"),
        (lambda t: (each for each in [t]), "generator"),
        (lambda t: {"a": t}.values(), "dict_values"),
        (lambda t: functools.partial(torch.add, t), "functools.partial"),
    ],
)
def test_what_cannot_be_opened_is_counted(hiding, name):
    value = [hiding(x()), {"b": hiding(x())}]
    assert tree.tensors(value) == []
    assert tree.opaque(value) == {name: 2}


def test_what_holds_plain_values_or_nothing_hides_none():
    class Empty:
        pass

    class OwnSet(set):
        pass

    values = [{1, 2}, frozenset("ab"), set(), Empty(), object(), OwnSet(), OwnSet([1])]
    assert tree.opaque(values) == {}
    assert list(tree.opaque([OwnSet([x()])])) == [tree.type_name(OwnSet)]


def test_a_set_of_arrays_is_no_riddle():
    numpy = pytest.importorskip("numpy")
    assert tree.opaque([{numpy.float32(1)}]) == {}


@pytest.mark.parametrize("slots", [{}, {"__slots__": ("x",)}])
def test_a_class_that_was_looked_into_is_not_kept_alive(slots):
    kind = type("Local", (), dict(slots))
    value = kind()
    value.x = x()
    assert paths(value) == [".x"]
    kept = weakref.ref(kind)
    del kind, value
    gc.collect()
    assert kept() is None


def test_code_of_others_that_raises_makes_a_type_opaque():
    found = tree.opaque([Broken()])
    assert list(found) == [tree.type_name(Broken)]


def test_an_object_that_leads_to_the_whole_program_costs_little():
    class Trainer:
        def __init__(self):
            self.first = x()
            self.samples = [(i, [i]) for i in range(50_000)]
            self.last = x()

    visited = []

    class Own(tree.Walk):
        def _visit(self, value, *rest):
            visited.append(value)
            super()._visit(value, *rest)

    walk = Own((torch.Tensor,), tree.MAX_DEPTH)
    walk.visit(Trainer())
    assert len(visited) <= tree.MAX_VALUES_OF_OBJECTS + 1
    assert paths(Trainer()) == [".first"]
    assert "tuple" in tree.opaque(Trainer())
    # Containers alone, and plain values, are not held short.
    assert len(paths([[x()] for _ in range(20_000)])) == 20_000
    assert paths(Object([*range(200_000), x()])) == [".x[200000]"]


def test_cycles_and_sharing_stay():
    value = Cyclic(x())
    changed = tree.mapped(value, torch.neg)
    assert changed.me is changed
    assert changed.parts[0] is changed
    part = [x()]
    first, second = tree.mapped((part, part), torch.neg)
    assert first is second
    loop = ([],)
    loop[0].extend([loop, x()])
    changed = tree.mapped(loop, torch.neg)
    assert changed[0][0] is changed
    assert changed[0][1].tolist() == [-1, -1, -1]
    graph = tree.mapped(GraphLike(x()), torch.neg)
    assert graph._store._parent() is graph


def test_a_tensor_that_occurs_twice_is_changed_once():
    calls, tensor = [], x()
    changed = tree.mapped([tensor, {"a": tensor}], lambda t: calls.append(t) or t + 1)
    assert len(calls) == 1
    assert changed[0] is changed[1]["a"]


def test_what_holds_no_changed_tensor_stays_the_same_object():
    kept, tensor, other = Plain([x()]), x(), object()
    value = {"kept": kept, "changed": [tensor, other], "text": "a"}
    changed = tree.mapped(value, lambda each: each + 1 if each is tensor else each)
    assert changed["kept"] is kept
    assert changed["changed"][1] is other
    assert list(changed) == list(value)


def test_factories_orders_lengths_and_attributes_beside_the_items_stay():
    value = collections.defaultdict(list, a=x())
    assert tree.mapped(value, torch.neg).default_factory is list
    ordered = collections.OrderedDict(a=x(), b=x())
    ordered.move_to_end("a")
    assert list(tree.mapped(ordered, torch.neg)) == ["b", "a"]
    assert tree.mapped(collections.deque([x()], 5), torch.neg).maxlen == 5

    class Tagged(dict):
        pass

    tagged = Tagged(a=x())
    tagged.tag, tagged.same = "tag", tagged["a"]
    changed = tree.mapped(tagged, torch.neg)
    assert changed.tag == "tag"
    assert changed.same is changed["a"]
    output = tree.mapped(Output(x=x()), torch.neg)
    assert output.x is output["x"] is output.to_tuple()[0]


def test_return_types_of_torch_are_rebuilt():
    value = torch.max(torch.eye(2), 0)
    changed = tree.mapped(value, lambda each: each + 1)
    assert type(changed) is type(value)
    assert changed.values.tolist() == [2, 2]


def test_a_type_that_cannot_be_rebuilt_is_named():
    class Day(datetime.date):
        """Cannot be made without arguments."""

    day = Day(2024, 1, 1)
    day.x = x()
    assert paths(day) == [".x"]
    with pytest.raises(tree.NotRebuilt, match=r"cannot rebuild .*Day"):
        tree.mapped(day, torch.neg)


def test_no_constructor_runs():
    class Strict:
        def __init__(self):
            raise AssertionError

        __copy__ = __reduce_ex__ = __setattr__ = __init__

    value = object.__new__(Strict)
    vars(value)["x"] = x()
    assert tree.mapped(value, torch.neg).x.tolist() == [-1, -1, -1]


def test_subclasses_of_tensors_are_tensors():
    class Own(torch.Tensor):
        pass

    value = x().as_subclass(Own)
    value.note = [x()]
    assert tree.tensors([value]) == [((tree.Part("index", 0),), value)]
    parameter = nn.Parameter(x())
    assert paths({"p": parameter}) == ["['p']"]


def test_values_of_other_types_are_found():
    model = nn.Linear(1, 1)
    found = tree.find([Object(model), x()], (nn.Module,))
    assert [(tree.path_text(path), each) for path, each in found] == [("[0].x", model)]


def test_a_cache_of_transformers():
    from transformers import DynamicCache

    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0)
    assert paths(cache) == [".layers[0].keys", ".layers[0].values"]
    assert tree.mapped(cache, torch.neg).layers[0].keys.item() == -1
    assert cache.layers[0].keys.item() == 1


def test_a_batch_of_graphs():
    from torch_geometric import data

    one = data.Data(x=torch.ones(2, 3), edge_index=torch.tensor([[0], [1]]))
    batch = data.Batch.from_data_list([one, one])
    changed = tree.mapped(batch, lambda t: t * 2 if t.is_floating_point() else t)
    assert changed.x.sum() == 24
    assert batch.x.sum() == 12
    assert changed._store._parent() is changed
    assert changed.num_nodes == 4
    assert "._store['x']" in paths(batch)
    hetero = data.HeteroData()
    hetero["paper", "cites", "paper"].edge_index = torch.zeros(2, 1)
    [path] = paths(hetero)
    assert path == "._edge_store_dict[('paper', 'cites', 'paper')]['edge_index']"


LEAVES = st.one_of(
    st.builds(lambda n: torch.full((2,), float(n)), st.integers(0, 99)),
    st.integers(),
    st.text(max_size=3),
    st.none(),
)
MAKERS = [each.make for name, each in CONTAINERS.items() if "nested" not in name]
VALUES = nested_values(LEAVES, MAKERS)


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_a_rebuilt_value_has_the_same_paths_and_the_old_one_is_untouched(value):
    before, before_paths = tree.tensors(value), paths(value)
    numbers = [each.tolist() for _, each in before]
    assert tree.mapped(value, lambda each: each) is value
    changed = tree.mapped(value, lambda each: each + 1)
    after = tree.tensors(changed)
    assert type(changed) is type(value)
    assert paths(changed) == before_paths
    assert [each.tolist() for _, each in after] == [[m + 1, n + 1] for m, n in numbers]
    now = tree.tensors(value)
    assert [id(each) for _, each in now] == [id(each) for _, each in before]
    assert [each.tolist() for _, each in now] == numbers
    assert (changed is value) == (not before)
    for path, tensor in before:
        assert tree.at(value, path) is tensor


@settings(max_examples=100, deadline=None)
@given(st.recursive(LEAVES, lambda inner: st.lists(inner) | st.tuples(inner, inner)))
def test_it_agrees_with_the_pytree_of_torch(value):
    expected = torch.utils._pytree.tree_map_only(torch.Tensor, torch.neg, value)
    found = tree.mapped(value, torch.neg)
    assert str(found) == str(expected)


def test_a_deep_copy_of_a_value_has_the_same_paths():
    value = {"a": Wrapper(b=[x()]), "c": Object(x())}
    assert paths(copy.deepcopy(value)) == paths(value)


def test_containers_anew_for_code_that_takes_items_out():
    tensor, config = x(), Object([1])
    value = ({"x": tensor, "n": 1}, [2], Plain([tensor]), config, {3})
    copied = tree.mapped(value, lambda each: each, anew=True)
    assert [id(each) for _, each in tree.tensors(copied)] == [id(tensor)] * 2
    copied[0].clear()
    copied[1].clear()
    copied[2].x.clear()
    assert value[0] == {"x": tensor, "n": 1}
    assert value[1] == [2]
    assert value[2].x[0] is tensor
    assert copied[3] is config
    assert copied[4] is value[4]
    empty = {"flag": True}
    assert tree.mapped(empty, torch.neg, anew=True) is not empty


def test_containers_anew_leave_what_cannot_be_copied():
    class Day(datetime.date):
        pass

    day = Day(2024, 1, 1)
    day.x = x()
    value = [day, {"y": day.x}]
    copied = tree.mapped(value, lambda each: each, anew=True)
    assert copied[0] is day
    assert copied[1] is not value[1]


def test_other_values_are_replaced_too():
    value = [torch.float16, {"d": torch.float16, "n": 1.5}, x()]
    wide = tree.mapped(
        value, lambda each: torch.float64, kinds=(torch.dtype,), anew=False
    )
    assert wide[:2] == [torch.float64, {"d": torch.float64, "n": 1.5}]
    found = tree.find(value, (float,))
    assert [(tree.path_text(path), n) for path, n in found] == [("[1]['n']", 1.5)]


def test_a_walk_can_be_held_short():
    found = tree.find([[1, 2], [3, 4]], (int,), most=3)
    assert [n for _, n in found] == [1, 2]


class OfPlain:
    def __init__(self, *values):
        self.name, self.values, self.more = "x", values, {"a": [1, 2.0]}


class OfItself:
    def __init__(self):
        self.own = self


BARREN = {
    "objects": lambda: [OfPlain(1, None), OfPlain(2, b"x"), OfPlain()],
    "declared": lambda: [OneField(1), OneField((1, 2))],
    "in an object": lambda: OfPlain([OfPlain(1), OfPlain(2)]),
    "with a tensor": lambda: [OfPlain(1), OfPlain(torch.ones(1)), OfPlain(2)],
    "with a set": lambda: [OfPlain(1), OfPlain({1, 2})],
    "with an iterator": lambda: [OfPlain(iter([1]))],
    "with a function": lambda: [OfPlain(lambda: 1)],
    "with an array": lambda: [OfPlain(np.ones(1))],
    "a cycle": lambda: [OfItself(), OfPlain(OfItself())],
    "shared": lambda: [OfPlain(1)] * 3,
    "empty": lambda: [type("Empty", (), {})(), OfPlain(type("Empty", (), {})())],
    "nested deep": lambda: [OfPlain([[[[[[torch.ones(1)]]]]]])],
    "many": lambda: [OfPlain(*range(200)), OfPlain(*[OfPlain(1)] * 200)],
}


@dataclasses.dataclass
class OneField:
    value: object


@pytest.mark.parametrize("kind", BARREN)
@pytest.mark.parametrize("kinds", [(torch.Tensor,), (float, complex)])
def test_objects_of_plain_values_are_passed_over_as_if_opened(monkeypatch, kind, kinds):
    value = BARREN[kind]()

    def walked():
        walk = tree.Walk(kinds)
        walk.visit_call((value,), {"more": value})
        return (
            [(path, id(each)) for path, each in walk.found],
            walk.opaque,
            [(path, of) for path, of in walk.unknown if of is not OfPlain],
            {path for path, _ in walk.unknown},
            walk.leaves,
            walk.lists,
        )

    fast = walked()
    monkeypatch.setattr(tree.Walk, "_num_barren", lambda *_: -1)
    slow = walked()
    if kind == "shared":  # each place is listed, since none is remembered
        fast, slow = ((*each[:2], *each[4:]) for each in (fast, slow))
    assert fast == slow


def test_objects_of_plain_values_are_not_opened():
    walk = tree.Walk((torch.Tensor,))
    walk.visit([OfPlain(i) for i in range(1000)])
    assert len(walk.opened) == 1


def test_a_walk_can_be_limited_to_some_objects():
    values = [OfPlain(torch.ones(1)) for _ in range(10)]
    walk = tree.Walk((torch.Tensor,), objects=4)
    walk.visit(values)
    assert len(walk.values) == 4
    assert len(walk.opaque) == 1
    assert len(tree.tensors_in(values, objects=4)) == 4
    assert len(tree.tensors_in(values)) == 10
