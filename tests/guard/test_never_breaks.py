"""A program runs on as it would without a guard, whatever it is made of."""

import collections
import copy
import dataclasses
import functools
import gc
import io
import logging
import pickle
import threading
import types
import warnings
from typing import ClassVar

import pytest
import torch
from assembled import Assembled
from guarding import INF, NAN, assert_same, batches, hooks_of, make, plant, train_step
from modes import Functions, Operators
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils._pytree import tree_map

from overflow_fast import DebugUnderflowOverflow, OverflowGuard
from overflow_fast.base.losses import loss_in
from overflow_fast.monitors import Headroom, Underflow

pytestmark = pytest.mark.explains
X = torch.ones(1, 2)


class Returns(nn.Module):
    """Returns what it is given by a function, and computes something."""

    def __init__(self, returned):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.returned = returned

    def forward(self, x):
        return self.returned(self.fc(x))


def watch_by_guard(model):
    return OverflowGuard(model, None, "warn")


def watch_by_detector(model):
    return DebugUnderflowOverflow(model)


WATCHERS = [watch_by_guard, watch_by_detector]


# What a model returns.


def asked(self):
    raise AssertionError("the user's code was run")


class Property:
    loss = property(asked)


class Interrupting:
    @property
    def loss(self):
        raise KeyboardInterrupt


class Lazy:
    __getattr__ = asked


class Guarding:
    def __getattribute__(self, name):
        asked(self)


class OddDict(dict):
    get = __getitem__ = __iter__ = items = keys = values = asked


class OddList(list):
    __iter__ = __getitem__ = __len__ = asked


class OddTuple(tuple):
    __slots__ = ()
    __iter__ = __getitem__ = __len__ = asked


class OddClass:
    __class__ = property(asked)


@dataclasses.dataclass
class OddField:
    out: torch.Tensor

    @property
    def late(self):
        asked(self)


OddField.__dataclass_fields__["late"] = OddField.__dataclass_fields__["out"]

ODD = {
    "property": lambda x: Property(),
    "interrupting": lambda x: Interrupting(),
    "getattr": lambda x: Lazy(),
    "getattribute": lambda x: Guarding(),
    "dict": lambda x: OddDict(out=x),
    "list": lambda x: OddList([x]),
    "tuple": lambda x: OddTuple((x,)),
    "class": lambda x: OddClass(),
    "field": lambda x: OddField(x),
    "in a list": lambda x: [Property(), x],
    "in a tuple": lambda x: (x, Lazy()),
    "a type": lambda x: Property,
    "a generator": lambda x: (each for each in (x,)),
}


@pytest.mark.parametrize("watch", WATCHERS)
@pytest.mark.parametrize("odd", ODD)
def test_none_of_the_code_of_an_output_runs(odd, watch):
    model = Returns(ODD[odd])
    with watch(model):
        output = model(X)
    if odd == "a generator":
        assert len(list(output)) == 1


def test_the_loss_is_what_an_output_holds():
    class Slots:
        __slots__ = ("loss", "other")

    loss, slots = torch.tensor(1.0), Slots()
    assert loss_in(slots) is None
    slots.loss = loss
    for output in (
        slots,
        {"loss": loss},
        OddDict(loss=loss),
        types.SimpleNamespace(loss=loss),
        types.SimpleNamespace(loss=[X, {"loss": (None, loss)}]),
        (X, loss),
        OddList([X, loss]),
    ):
        assert loss_in(output) is loss
    for output in ({"out": loss}, X, None, 1.0, {"loss": 1.0}, types.SimpleNamespace):
        assert loss_in(output) is None


@pytest.mark.parametrize("odd", ["property", "interrupting"])
def test_a_property_under_torch_compile(odd, fresh_compiler):
    model = Returns(lambda x: (x, ODD[odd](x)))
    compiled = torch.compile(model, backend="aot_eager")
    with OverflowGuard(model, None, "warn", watch=["loss"]) as guard:
        compiled(X)
        assert guard.coverage().failures == 0


# Deep and endless nesting.


def nested(kind, depth):
    def nest(x):
        for _ in range(depth):
            x = {"dict": lambda x: {"x": x}, "list": lambda x: [x]}.get(
                kind, lambda x: (x,)
            )(x)
        return x

    return nest


def endless_list(x):
    output = [x]
    output += [output] * 10
    return output


def endless_dict(x):
    output = {"x": x}
    output["loss"] = output["self"] = output
    return output


def endless_object(x):
    output = types.SimpleNamespace(x=x)
    output.loss = output
    return output


def doubling(x):
    for _ in range(40):
        x = [x, x]
    return x


def coverage_of(watch, model):
    with watch(model) as watcher:
        model(X)
        coverage = watcher.coverage
        return coverage() if callable(coverage) else coverage


@pytest.mark.parametrize("watch", WATCHERS)
@pytest.mark.parametrize("kind", ["tuple", "list", "dict"])
def test_deep_nesting(kind, watch):
    model = Returns(nested(kind, 2000))
    coverage = coverage_of(watch, model)
    assert coverage.opaque == {f"{kind} (nested too deep)": 1}
    assert coverage.not_scanned == {}


@pytest.mark.parametrize("returned", [endless_list, endless_dict])
@pytest.mark.parametrize("watch", WATCHERS)
def test_what_holds_itself_is_listed_once(returned, watch):
    model = Returns(returned)
    coverage = coverage_of(watch, model)
    assert coverage.opaque == coverage.not_scanned == {}
    assert coverage.tensors_listed == 6  # weights, inputs, and what is returned once


@pytest.mark.parametrize("returned", [endless_object, doubling])
def test_other_outputs_without_end(returned):
    model = Returns(returned)
    with OverflowGuard(model, None, "warn") as guard:
        model(X)
        assert guard.check() is None
        assert guard.coverage().failures == 0


class Takes(Assembled):
    def forward(self, x, *args, **kwargs):
        return self.fc(x)


@pytest.mark.parametrize(
    "given",
    [nested("tuple", 2000), endless_list, endless_dict, doubling],
    ids=lambda make: make.__name__,
)
def test_such_inputs(given):
    model = Takes(fc=nn.Linear(2, 2))
    with OverflowGuard(model, None, "warn") as guard:
        model(X, given(X), key=given(X))
        assert guard.check() is None
        is_whole = given in (endless_list, endless_dict)
        assert bool(guard.coverage().opaque) != is_whole


def test_such_optimizer_state():
    model, optimizer = make()
    parameter = next(model.parameters())
    endless = [torch.tensor(INF)]
    endless.append(endless)
    optimizer.state[parameter] = {"deep": nested("tuple", 2000)(X), "self": endless}
    with OverflowGuard(model, optimizer, "warn", watch=["optimizer_state"]) as guard:
        guard._parts.pipeline.tensors.scan(optimizer)
        first = guard.check().verdict.first
        assert guard.coverage().failures == 0
    assert first.fqn == "blocks.0.fc1.weight.self.0"


# Modes of the user's.


class Saved(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self):
        self.seen = collections.Counter()
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor):
        self.seen["pack"] += 1
        return tensor

    def unpack(self, tensor):
        self.seen["unpack"] += 1
        return tensor


class Own(torch.Tensor):
    seen: ClassVar = collections.Counter()

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen[getattr(function, "__name__", str(function))] += 1
        return super().__torch_function__(function, types, args, kwargs)


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.b = nn.Linear(4, 1)

    def forward(self, x, factor=1.0):
        return {"loss": (self.b(self.a(x)) * factor).mean()}


def run(mode, watch, factors=(1.0, 1.0), **options):
    """What a mode sees of two steps, an evaluation and a call of a submodule."""
    torch.manual_seed(0)
    model, x = Loss(), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher = watch(model, optimizer, **options)
    with mode:
        for factor in factors:
            optimizer.zero_grad()
            model(x, factor)["loss"].backward()
            optimizer.step()
        with torch.no_grad():
            model(x)
        model.a(x)
        if isinstance(watcher, OverflowGuard):
            watcher.record(x=x)
            for each in ("coverage", "headroom", "metrics", "discard", "check"):
                getattr(watcher, each)()
            watcher.disable()
            watcher.enable()
        if watcher is not None:
            watcher.remove()
    return mode.seen


def unwatched(model, optimizer):
    return None


def guarded(model, optimizer, **options):
    return OverflowGuard(model, optimizer, **options)


def detected(model, optimizer, **options):
    return DebugUnderflowOverflow(model, **options)


WATCHED = {
    "warn": functools.partial(guarded, on_overflow="warn"),
    "skip": functools.partial(guarded, on_overflow="skip"),
    "lagged": functools.partial(guarded, on_overflow="skip", sync="lagged"),
    "device": functools.partial(guarded, on_overflow="skip", _defer=True),
    "all": functools.partial(
        *(guarded,),
        on_overflow="skip",
        watch=["activations", "weights", "optimizer_state", "buffers", "gradients"],
        monitors=[Headroom(bits=1.0), Underflow(every=1)],
    ),
    "detector": detected,
    "detector on a device": functools.partial(detected, _defer=True),
}


@pytest.mark.parametrize("mode", [Functions, Operators, Saved])
@pytest.mark.parametrize("watched", WATCHED)
def test_a_mode_sees_nothing_of_ours(mode, watched):
    expected = run(mode(), unwatched)
    assert expected
    assert run(mode(), WATCHED[watched]) == expected


@pytest.mark.parametrize("mode", [Functions, Operators, Saved])
def test_a_mode_sees_nothing_of_a_report(mode, tmp_path):
    def watch(model, optimizer):
        return OverflowGuard(
            model, optimizer, "warn", evidence=tmp_path, log=tmp_path / "log"
        )

    factors = (1.0, INF)
    assert run(mode(), watch, factors) == run(mode(), unwatched, factors)


@pytest.mark.parametrize("watch", [WATCHED["warn"], WATCHED["detector"]])
def test_a_subclass_sees_nothing_of_ours(watch):
    counts = []
    for each in (unwatched, watch):
        Own.seen.clear()
        model = Loss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watcher = each(model, optimizer)
        model(torch.ones(3, 4).as_subclass(Own))["loss"].backward()
        optimizer.step()
        if watcher is not None:
            watcher.remove()
        counts.append(dict(Own.seen))
    assert counts[0] == counts[1]


def test_modes_are_back_after_a_guard_has_raised():
    model, optimizer = make()
    with OverflowGuard(model, optimizer) as guard, Functions() as mode:
        guard.record(loss=torch.tensor(INF))
        with pytest.raises(FloatingPointError):
            guard.check()
        before = mode.seen["add"]
        torch.add(X, X)
        assert mode.seen["add"] == before + 1
        guard.discard()


# Errors of the guard's own.


def broken(*args, **kwargs):
    raise RuntimeError("a fault of the guard")


class Broken:
    """Fails whatever is asked of it."""

    def __getattr__(self, name):
        raise RuntimeError("a fault of the guard")

    __iter__ = __enter__ = __exit__ = broken


CALLS = {
    "check": lambda guard: guard.check(),
    "record": lambda guard: guard.record(loss=X),
    "discard": lambda guard: guard.discard(),
    "coverage": lambda guard: str(guard.coverage()),
    "headroom": lambda guard: str(guard.headroom()),
    "metrics": lambda guard: guard.metrics(),
    "disable": lambda guard: guard.disable(),
    "enable": lambda guard: guard.enable(),
    "remove": lambda guard: guard.remove(),
    "exit": lambda guard: guard.__exit__(None, None, None),
}


@pytest.mark.parametrize("fault", ["pipeline", "watches", "headroom", "rules"])
@pytest.mark.parametrize("call", CALLS)
def test_no_error_of_its_own_comes_out(call, fault):
    guard = OverflowGuard(nn.Linear(2, 2), None, "warn")
    if call == "enable":
        guard.disable()
    kept = getattr(guard._parts, fault)
    setattr(guard._parts, fault, Broken())
    CALLS[call](guard)
    setattr(guard._parts, fault, kept)
    guard.remove()


def trained_beside(policy, fail, num_steps):
    """Steps of a guard that fails, which leave what those without one leave."""
    pairs = make(), make()
    x, y = torch.ones(4, 8), torch.ones(4, 1)
    with OverflowGuard(*pairs[0], policy) as guard:
        fail(guard._parts)
        for _ in range(num_steps):
            for model, optimizer in pairs:
                model(x, y=y)["loss"].backward()
                model.blocks[0](x)
                optimizer.step()
        assert guard.coverage().failures >= num_steps
        number = guard.step
    assert_same(*([p.detach() for p in model.parameters()] for model, _ in pairs))
    return guard, number


HOOKS = ["_before_step", "_choose_watch", "_end_step", "_record_root", "_begin_batch"]


@pytest.mark.parametrize("method", HOOKS)
def test_a_hook_that_fails_stops_no_forward(method, caplog):
    trained_beside("warn", lambda own: setattr(own.watches[0], method, broken), 1)
    assert "The guard failed" in caplog.text


PARTS = [("clock", "begin"), ("clock", "advance"), ("headroom", "end_step")]


@pytest.mark.parametrize("part, method", [*PARTS, ("_start", "keep")])
def test_a_round_that_fails_to_end_stops_no_step(part, method, caplog):
    def fail(own):
        setattr(getattr(own, part), method, broken)

    guard, number = trained_beside("raise", fail, 2)
    assert guard.coverage().failures == 2 and number == 2 * (method != "advance")
    assert "The guard failed" in caplog.text


def test_a_rule_that_fails_stops_no_forward(as_kept):
    model = nn.Sequential(nn.Linear(2, 2))
    with OverflowGuard(model, None, "warn", allow={"*:output": "nan"}) as guard:
        guard._parts.watches[0].recorder.set_rules(broken)
        model(X * INF)
        as_kept(guard.coverage().not_scanned)


@pytest.mark.parametrize("options", [{}, {"watch": "tripwire"}])
@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_torch_may_swap_what_a_guard_has_seen(options, num_optimizers):
    """`model.to()` swaps each weight, gradient and buffer of sharded models."""
    model, _ = make()
    model.blocks[0].fc2.weight.requires_grad_(False)
    model.register_buffer("large", torch.zeros(2**15))
    trained = [p for p in model.parameters() if p.requires_grad]
    split = [trained] if num_optimizers == 1 else [trained[:1], trained[1:]]
    optimizers = [torch.optim.AdamW(each) for each in split]
    with OverflowGuard(model, optimizers, "skip", explain=False, **options) as guard:
        for i in range(3):
            model.zero_grad()
            loss = model(torch.full((4, 8), INF if i == 1 else 1.0), y=torch.ones(4, 1))
            loss["loss"].backward()
            for each in optimizers:
                each.step()
        swap_all(model)
        assert guard.num_skipped == 1
    assert model.large.dtype == torch.float64


def swap_all(model):
    swaps = torch.__future__.set_swap_module_params_on_conversion
    swaps(True)
    try:
        model.double()
    finally:
        swaps(False)
    for module in model.modules():
        for each in module.buffers(recurse=False):
            torch.utils.swap_tensors(each, each.clone())


# GradScaler.


@pytest.fixture
def scaler_step(monkeypatch):
    monkeypatch.setattr(GradScaler, "step", GradScaler.step)  # and puts it back
    return GradScaler.step


def wrapper_of(inner, seen, name, wraps=True):
    def step(self, optimizer, *args, **kwargs):
        seen.append(name)
        return inner(self, optimizer, *args, **kwargs)

    return functools.wraps(inner)(step) if wraps else step


@pytest.mark.parametrize("wraps", [True, False])
def test_who_patches_a_scaler_after_the_guard_stays(scaler_step, wraps):
    seen = []
    model, optimizer = make()
    scaler = GradScaler("cpu", init_scale=2.0)
    guards = [OverflowGuard(model, optimizer, "warn")]
    GradScaler.step = other = wrapper_of(GradScaler.step, seen, "other", wraps)
    guards.append(OverflowGuard(*make(), "warn"))
    for guard in guards:
        guard.remove()
    assert GradScaler.step is other
    for _ in range(2):
        guard = OverflowGuard(model, optimizer, "warn")
        scaler.scale(model(torch.ones(4, 8), y=torch.ones(4, 1))["loss"]).backward()
        next(model.parameters()).grad.fill_(INF)
        scaler.step(optimizer)
        scaler.update()
        assert guard.step == 1
        guard.remove()
        assert GradScaler.step is other
    assert seen == ["other", "other"]


def test_who_patches_a_scaler_before_the_guard_stays(scaler_step):
    seen = []
    GradScaler.step = other = wrapper_of(GradScaler.step, seen, "other")
    guard = OverflowGuard(*make(), "warn")
    assert GradScaler.step is not other
    guard.remove()
    assert GradScaler.step is other


def test_who_takes_his_patch_back_takes_nothing_of_ours(scaler_step):
    model, optimizer = make()
    inner = GradScaler.step
    GradScaler.step = wrapper_of(inner, [], "other")
    guard = OverflowGuard(model, optimizer, "warn")
    GradScaler.step = inner
    guard.remove()
    assert GradScaler.step is inner is scaler_step
    with OverflowGuard(model, optimizer, "warn"):
        assert GradScaler.step is not scaler_step
    assert GradScaler.step is scaler_step


# Copies, and other watchers.


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


COPIES = [copy.deepcopy, pickled, saved_and_loaded]


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_of_a_model_with_a_guard(copied):
    model, optimizer = make()
    with OverflowGuard(model, optimizer, "warn") as guard:
        model(torch.ones(4, 8), y=torch.ones(4, 1))["loss"].backward()
        copy_ = copied(model)
        frames = guard._parts.watches[0].recorder.total_calls
        output = copy_(torch.ones(4, 8), y=torch.ones(4, 1))
        assert output["loss"].isfinite() and hooks_of(copy_) == 0
        assert guard._parts.watches[0].recorder.total_calls == frames
        optimizer.step()
        assert guard.step == 1
        second = OverflowGuard(copy_, None, "warn")
        with torch.no_grad():
            copy_.head.weight[0, 0] = NAN
        copy_(torch.ones(4, 8), y=torch.ones(4, 1))
        assert second.check().verdict.first.fqn == "head.weight"
        assert guard.check() is None
        second.remove()


def test_a_copy_of_a_part_copies_no_hook_of_the_rest():
    model, optimizer = make()
    hook = functools.partial(lambda lock, *_: None, threading.Lock())
    model.head.register_forward_hook(hook)
    with OverflowGuard(model, optimizer, "warn"):
        part = copy.deepcopy(model.blocks[0])  # a lock cannot be copied
        part(torch.ones(4, 8))
        assert hooks_of(part) == 0


@pytest.mark.parametrize("watch", WATCHERS)
@pytest.mark.parametrize("replaced", [copy.deepcopy, lambda part: nn.Identity()])
def test_a_copy_of_a_model_whose_part_was_replaced(watch, replaced):
    model, _ = make()
    with watch(model):
        model.blocks[0] = replaced(model.blocks[0])
        gc.collect()
        copy_ = copy.deepcopy(model)
    for each in (model, copy_):
        each(torch.ones(4, 8), y=torch.ones(4, 1))["loss"].backward()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_copy_of_a_model_with_a_guard_and_the_original_detector(is_first):
    debug_utils = pytest.importorskip("transformers.debug_utils")
    model, optimizer = make()
    if is_first:
        debug_utils.DebugUnderflowOverflow(model)
    with OverflowGuard(model, optimizer, "warn") as guard:
        if not is_first:
            debug_utils.DebugUnderflowOverflow(model)
        copy_ = copy.deepcopy(model)
        for each in (model, copy_):
            each(torch.ones(4, 8), y=torch.ones(4, 1))["loss"].backward()
        optimizer.step()
        assert guard.coverage().failures == 0
        assert guard.last_report is None


@pytest.mark.slow
def test_a_second_guard_says_so_and_both_work(caplog, as_kept):
    model, optimizer = make()
    with caplog.at_level(logging.WARNING, "overflow_fast"):
        with OverflowGuard(model, optimizer, "warn", explain=False) as first:
            assert "Another OverflowGuard" not in caplog.text
            with OverflowGuard(model, optimizer, "skip", explain=False) as second:
                said = [r for r in caplog.messages if "Another OverflowGuard" in r]
                assert len(said) == 1
                as_kept(said[0])
                with plant(model.head, INF):
                    train_step(model, optimizer, batches(1)[0])
                assert first.last_report.verdict == second.last_report.verdict
                assert second.num_skipped == 1


@pytest.mark.parametrize("is_inner_first", [True, False])
def test_a_guard_on_a_part_of_a_watched_model_says_so(is_inner_first, caplog):
    model, _ = make()
    parts = [model.blocks[0], model]
    with OverflowGuard(parts[not is_inner_first], None, "warn"):
        with OverflowGuard(parts[is_inner_first], None, "warn"):
            assert "Another OverflowGuard" in caplog.text


def test_one_guard_after_another_says_nothing(caplog):
    model, optimizer = make()
    first = OverflowGuard(model, optimizer, "warn")
    first.disable()
    OverflowGuard(model, optimizer, "warn").remove()
    first.enable()
    first.self_test((torch.ones(4, 8), torch.ones(4, 1)), max_layers=1)
    first.remove()
    with OverflowGuard(model, optimizer, "warn"), OverflowGuard(*make(), "warn"):
        pass
    assert "Another OverflowGuard" not in caplog.text


@pytest.mark.parametrize("kind", [nn.Sequential, nn.ModuleList, None])
def test_models_that_are_false_or_have_no_length(kind, caplog, as_kept):
    model = torch.compile(nn.Linear(2, 2)) if kind is None else kind()
    with OverflowGuard(model, None, "warn") as guard:
        with OverflowGuard(model, None, "warn"):
            pass
        assert guard.coverage().failures == 0
    assert "The guard failed" not in caplog.text
    as_kept(caplog.messages)


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as quantized and sharded ones are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def bare(value):
            return value.inner if isinstance(value, Wrapped) else value

        args, kwargs = tree_map(bare, (args, kwargs or {}))
        made = function(*args, **kwargs)
        return tree_map(
            lambda e: Wrapped(e) if isinstance(e, torch.Tensor) else e, made
        )


def jagged(rows):
    return torch.nested.nested_tensor(list(rows.split(2)), layout=torch.jagged)


def nested_strided(rows):
    return torch.nested.nested_tensor(list(rows.split(2)))


@pytest.mark.parametrize("kind", [jagged, nested_strided, Wrapped])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_bad_step_whose_batch_is_of_another_kind(kind):
    class Inner(nn.Module):
        def forward(self, x):
            return x.inner if isinstance(x, Wrapped) else x

    model = nn.Sequential(Inner(), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "skip", explain=True) as guard:
        for value in (1.0, 2.0, INF, 3.0):
            rows = torch.tensor([[value, 1.0]]).repeat(4, 1)
            output = model(kind(rows))
            if output.is_nested:
                output = torch.cat(output.unbind())
            loss = output.square().mean()
            loss.backward()
            optimizer.step()
            assert guard.last_step_skipped == (value == INF)
            optimizer.zero_grad()
        assert guard.coverage().failures == 0
    assert model[1].weight.isfinite().all()


def test_a_model_that_the_first_batch_makes():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "skip") as guard:
        for x in (torch.randn(3, 2), torch.full((3, 2), NAN), torch.randn(3, 2)):
            model(x).square().mean().backward()
            optimizer.step()
            assert guard.last_step_skipped == bool(x.isnan().any())
            optimizer.zero_grad()
        assert guard.coverage().failures == 0


@pytest.mark.parametrize("watch", ["tripwire", ("activations", "gradients")])
def test_other_weights_for_one_forward_bring_no_warning(watch):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        OverflowGuard(model, optimizer, watch=watch),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            model(X).sum().backward()
            moved = {name: 2 * each for name, each in model.named_parameters()}
            torch.func.functional_call(model, moved, X).sum().backward()
            optimizer.step()
    assert not caught
