"""What the recorder lists of a call: the tensors that `tree` lists, in its paths."""

import collections
import dataclasses
import functools
import gc
import logging
import threading
import types
import weakref

import pytest
import torch
from containers import (
    CONTAINERS,
    Broken,
    Object,
    OwnDict,
    Plain,
    SlotsObject,
    nested_values,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from overflow_fast import DebugUnderflowOverflow, NonFiniteError, OverflowGuard
from overflow_fast.base import tree
from overflow_fast.base.tree import label_text

INF, NAN = float("inf"), float("nan")
KINDS = pytest.mark.parametrize("kind", CONTAINERS)


class Echo(nn.Module):
    """Returns its first argument."""

    def forward(self, value, *args, **kwargs):
        return value


def listed(*args, **kwargs):
    """The entries of a call that is given these and returns the first, and opaque."""
    with DebugUnderflowOverflow(model := Echo()) as detector:
        model(*args, **kwargs)
        recorder = detector.recorder
        return recorder.entries(recorder.history()[-1]), detector.coverage.opaque


def tensors_of(entries, begin):
    """Labels and values of the tensors listed under a name."""
    found = [(label_text(each.label), each.stat) for each in entries]
    return [
        (label, stat.abs_max)
        for label, stat in found
        if stat is not None and label.startswith(begin)
    ]


def expected_of(found, begin):
    return [(f"{begin}{tree.path_text(path)}", float(t.max())) for path, t in found]


def check(args, kwargs):
    entries, opaque = listed(*args, **kwargs)
    given = tree.Walk((torch.Tensor,))
    given.visit_call(args, kwargs)
    returned = tree.Walk((torch.Tensor,))
    returned.visit(args[0])
    assert tensors_of(entries, "input") == expected_of(given.found, "input")
    found, expected = (
        tensors_of(entries, "output"),
        expected_of(returned.found, "output"),
    )
    if not isinstance(args[0], tuple):
        assert found == expected
    else:  # tuples of the outer two levels are listed at each place
        assert set(found) >= set(expected)
        paths = {f"output{tree.path_text(path)}" for path, _ in returned.found}
        assert {label for label, _ in set(found) - set(expected)}.isdisjoint(paths)
    names = [tree.type_name(kind) for _, kind in given.opaque + returned.opaque]
    bare = collections.Counter()
    for name, count in opaque.items():
        bare[name.partition(" (")[0]] += count
    assert bare == collections.Counter(names)


# Values of all kinds.


class OddDict(dict):
    def __iter__(self):
        raise AssertionError("an overridden method ran")

    items = keys = values = __getitem__ = get = __iter__


class OddTuple(tuple):
    __slots__ = ()

    def __iter__(self):
        raise AssertionError("an overridden method ran")

    __getitem__ = __len__ = __iter__


class Raising(dict):
    """Beside its items, an attribute that is not listed."""

    def __init__(self, **items):
        super().__init__(**items)
        self.beside = torch.full((2,), 5e5)

    @property
    def computed(self):
        raise AssertionError("a property ran")


class Beside(OwnDict):
    """A wrapper with attributes of its own."""

    def __init__(self, value):
        super().__init__(x=value)
        self.beside = [value]


def looped_list(value):
    made = [value]
    made += [made, (made, value)]
    return made


def looped_dict(value):
    made = {"x": value}
    made["again"] = [made, value]
    return made


def looped_tuple(value):
    made = ([value],)
    made[0].append(made)
    return made


def nested(depth):
    def make(value):
        for level in range(depth):
            value = {"a": value} if level % 5 == 4 else [value]
        return value

    return make


def nested_objects(depth):
    def make(value):
        for level in range(depth):
            value = types.SimpleNamespace(a=value) if level % 2 else Plain(value)
        return value

    return make


MAKERS = [
    *(each.make for name, each in CONTAINERS.items() if name != "graph"),
    *(looped_list, looped_dict, looped_tuple, Beside),
    *(nested(depth) for depth in (13, 14, 15, 16, 17)),
    *(nested_objects(depth) for depth in (15, 16, 17)),
    *(lambda x: OddDict(a=x), lambda x: OddTuple([x]), lambda x: Raising(a=x)),
    *(lambda x: {("a", 1): x, 2: x, None: x}, lambda x: types.SimpleNamespace()),
    *(lambda x: SlotsObject.__new__(SlotsObject), lambda x: iter([x]), lambda x: {1}),
    lambda x: {"a": x}.values(),
    lambda x: functools.partial(torch.add, x),
]
LEAVES = st.one_of(
    st.builds(lambda n: torch.full((2,), float(n)), st.integers(1, 99)),
    st.sampled_from([None, 3, "text", 1.5, True, (), [], {}, torch.Size([2])]),
)
VALUES = nested_values(LEAVES, MAKERS)
T = torch.ones(2)


@settings(max_examples=300, deadline=None)
@given(VALUES, VALUES, VALUES)
@example(looped_tuple(T), None, None)
@example(Plain([T]), (T, T), {"a": [T]})
@example(shared := [T, {"a": T}], (shared, T), shared)
@example((pair := (T, [T]), pair), pair, None)
@example({}, [], [nested_objects(15)([])])
@example({}, [], [nested_objects(16)([])] * 2)
@example({}, [], [nested_objects(17)([])])
def test_the_recorder_lists_what_the_walk_in_python_lists(first, second, named):
    check((first, second), {"named": named, "again": second})


@KINDS
def test_each_kind_of_container_is_listed(kind):
    container = CONTAINERS[kind]
    value = container.make(T)
    entries, opaque = listed(value)
    assert tensors_of(entries, "input") == [(f"input[0]{container.path}", 1.0)]
    assert tensors_of(entries, "output") == [(f"output{container.path}", 1.0)]
    assert opaque == {}
    check((container.make(T), T), {"named": container.make(T)})


@pytest.mark.parametrize("depth", [15, 16, 17])
@pytest.mark.parametrize("make", [nested, nested_objects])
def test_sixteen_containers_are_opened(make, depth):
    entries, opaque = listed(make(depth)(T))
    assert len(tensors_of(entries, "output")) == (depth <= 16)
    assert sum(opaque.values()) == 2 * (depth > 16)
    assert all(name.endswith(" (nested too deep)") for name in opaque)
    assert listed(make(17)(3))[1] == {}


# Which of them reports list.


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        (Plain([T, 1, None]), ["output.x[0]", "output.x[1]", "output.x[2]"]),
        (OwnDict(a=T, n=1), ["output['a']", "output['n']"]),
        (Beside(T), ["output['x']"]),
        (CONTAINERS["attrs"].make(T), ["output.x"]),
        (collections.deque([T, 1]), ["output[0]", "output[1]"]),
        (Object(T), ["output"]),
        ([Object(T), 1], ["output"]),
        ([Object(T), T], ["output[0]", "output[1]"]),
        (types.SimpleNamespace(a=[T, 1]), ["output"]),
        ([[1, None], T, [[2]]], ["output[0]", "output[1]", "output[2]"]),
        ({"a": [1], "b": {"c": [None]}}, ["output"]),
        (
            (1, (None, [1]), ((T, ()),), ()),
            [
                *("output[0]", "output[1][0]", "output[1][1]"),
                *("output[2][0][0]", "output[2][0][1]"),
            ],
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_healthy_frames_list_what_classes_declare(value, lines):
    entries, _ = listed(value)
    found = [label_text(each.label) for each in entries if not each.only_if_bad]
    assert found == ["input[0]", *lines]


@KINDS
def test_a_bad_value_in_each_kind_of_container_is_an_alarm(kind):
    container, bad = CONTAINERS[kind], torch.tensor([1.0, NAN])
    model, echo = nn.Sequential(Echo()), Echo()
    for watched, begin, call in (
        (model, "input[0]", lambda: model(container.make(bad))),
        (echo, "input.named", lambda: echo(None, named=container.make(bad))),
    ):
        with OverflowGuard(watched, None, "warn", explain=False) as guard:
            call()
            first = guard.check().verdict.first
        assert first.label == f"{begin}{container.path}"


def test_a_bad_value_in_an_object_has_its_line_behind_that_of_the_object(as_kept):
    class Makes(nn.Module):
        def forward(self, x):
            return [types.SimpleNamespace(a=x / 0, b=x), 1]

    model = nn.Sequential(Makes())
    with OverflowGuard(model, None, "warn", explain=False) as guard:
        model(T)
        text = str(guard.check())
    as_kept(text)


def test_gradients_of_attributes_of_plain_objects_are_not_recorded():
    class Makes(nn.Module):
        def forward(self, x):
            return types.SimpleNamespace(a=x * 2), Plain(x * 3)

    model = nn.Sequential(nn.Linear(2, 2), Makes())
    with OverflowGuard(model, None, "warn", explain=False) as guard:
        hidden, shown = model(T)
        ((hidden.a * NAN).sum() + shown.x.sum()).backward()
        first = guard.check().verdict.first
    assert (first.fqn, first.label) == ("0", "grad_output")  # of what made both


# What is not looked into.


def test_what_is_not_looked_into_is_counted_and_logged_once_for_each_type(caplog):
    model = nn.Sequential(Echo())
    config = types.SimpleNamespace(sizes=[1, 2], name="a", parts={"b"}, odd=object())
    harmless = [config, len, Echo, nn.Linear(1, 1), threading.Lock(), {1, 2}, st]
    with OverflowGuard(model, None, "warn") as guard:
        for value in harmless:
            model(value)
        assert guard.coverage().opaque == {}
        with caplog.at_level(logging.WARNING, "overflow_fast"):
            for _ in range(3):
                model([{T}, iter([T])])
                model(each for each in [T])
        opaque = guard.coverage().opaque
        assert guard.coverage().failures == 0
    # As input and as output, of the root and of its part.
    assert opaque == {"set": 12, "list_iterator": 12, "generator": 12}
    logged = [text for text in caplog.messages if "not looked into" in text]
    assert len(logged) == 2
    assert "list_iterator" in logged[0]
    assert "generator" in logged[1]


def test_an_iterator_is_not_advanced():
    values = iter([T, T])
    listed(values)
    assert len(list(values)) == 2


def test_code_of_others_that_raises_makes_a_value_opaque():
    check((Broken(), T), {})
    assert list(listed(Broken())[1]) == [tree.type_name(Broken)]


@pytest.mark.slow
def test_an_object_that_leads_to_the_whole_program_is_cut(as_kept):
    class Trainer:
        def __init__(self):
            self.first = T
            self.samples = [(i, [i]) for i in range(50_000)]
            self.last = T

    value = Trainer()
    check((value, T), {})
    entries, opaque = listed(value)
    assert tensors_of(entries, "input") == [("input[0].first", 1.0)]
    as_kept(opaque)
    many = [[T] for _ in range(20_000)]
    assert len(tensors_of(listed(many)[0], "output")) == 20_000
    far = Object([*range(200_000), T])
    assert tensors_of(listed(far)[0], "output") == [("output.x[200000]", 1.0)]


# What is known of types.


def test_types_come_and_go():
    """Addresses of types are used again, by types of another kind."""
    for i in range(100):
        make = [
            lambda: type("Local", (dict,), {})(a=T),
            lambda: type("Local", (list,), {})([T]),
            lambda: dataclasses.make_dataclass("Local", ["a"])(T),
            lambda: type("Local", (), {"__slots__": ("a",)})(),
            lambda: type("Local", (nn.Module,), {})(),
        ][i % 5]
        value = make()
        if i % 5 == 3:
            value.a = T
        check((value, T), {})
        del value
        if i % 20 == 0:
            gc.collect()


@pytest.mark.parametrize("slots", [{}, {"__slots__": ("a",)}])
def test_a_class_that_was_looked_into_is_not_kept_alive(slots):
    kind = type("Local", (), dict(slots))
    value = kind()
    value.a = T
    listed(value)
    kept = weakref.ref(kind)
    del kind, value
    gc.collect()
    assert kept() is None


def test_what_lies_about_its_class_is_no_tensor():
    class Lying:
        __class__ = torch.Tensor

    entries, _ = listed([Lying(), T])
    assert tensors_of(entries, "output") == [("output[1]", 1.0)]


def test_threads_look_into_values_of_new_types():
    errors = []

    def run():
        try:
            for _ in range(30):
                kind = dataclasses.make_dataclass("Local", ["a", "b"])
                entries, _ = listed(kind([T], kind(T, None)))
                assert len(tensors_of(entries, "output")) == 2
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_cache_of_transformers_is_looked_into():
    from transformers import DynamicCache

    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 1, 1), torch.full((1, 1, 1, 1), INF), 0)
    model = Echo()
    with OverflowGuard(model, None, explain=False) as guard:
        model(T, past_key_values=cache)
        with pytest.raises(NonFiniteError) as raised:
            guard.check()
    first = raised.value.report.verdict.first
    assert first.label == "input.past_key_values.layers[0].values"
    assert "layers[0].keys" not in str(raised.value.report)
