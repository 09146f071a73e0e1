"""What is run again changes nothing for other threads, and nothing for later."""

import ast
import contextlib
import copy
import gc
import sys
import threading
import time
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from overflow_fast import DebugUnderflowOverflow, OverflowGuard, advise_precision
from overflow_fast.detector.observers import without_observers
from overflow_fast.explainer import syntax
from overflow_fast.explainer.effects.before import Before
from overflow_fast.explainer.snapshot import Snapshot
from overflow_fast.integrations import script_models
from overflow_fast.monitors import MaskedOps
from overflow_fast.torch_internals.compiled_calls import uncompiled_calls

assert torch._dynamo.list_backends()  # imports it


def of_another_thread(function):
    """What a function returns in another thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


# Compiled code runs eagerly in one thread.


class Backend:
    """Notes the graphs that it is given, and runs them as they are."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph


def sine(x):
    return x.sin() + 1


class Sine(nn.Module):
    def forward(self, x):
        return sine(x)


def compiled_in_place(backend):
    module = Sine()
    module.compile(backend=backend)
    return module


def calling_compiled(backend):
    inner = torch.compile(lambda x: x.cos(), backend=backend)
    return lambda x: inner(x) + 1


FORMS = {
    "function": lambda backend: torch.compile(sine, backend=backend),
    "whole graph": lambda backend: torch.compile(sine, backend=backend, fullgraph=True),
    "module": lambda backend: torch.compile(Sine(), backend=backend),
    "in place": compiled_in_place,
    "called by another": calling_compiled,
    "in compiled code": lambda backend: torch.compile(
        calling_compiled(backend), backend=backend
    ),
}


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("form", FORMS)
def test_compiled_code_runs_eagerly_in_one_thread_alone(form):
    backend = Backend()
    call, x = FORMS[form](backend), torch.ones(2)
    with uncompiled_calls():
        call(x)
        assert not backend.graphs
        of_another_thread(lambda: call(x))
        assert backend.graphs
        count = len(backend.graphs)
        call(x)
        with uncompiled_calls():
            call(x)
        call(x)
        with contextlib.suppress(KeyError), uncompiled_calls():
            raise KeyError
        call(x + 1)
        assert len(backend.graphs) == count
    torch._dynamo.reset()
    call(x)
    assert len(backend.graphs) > count


def test_what_backward_computes_again_runs_eagerly_too():
    backend = Backend()
    call = torch.compile(sine, backend=backend)
    x = torch.ones(2, requires_grad=True)
    with uncompiled_calls():
        checkpoint(call, x, use_reentrant=False).sum().backward()
    assert not backend.graphs and x.grad is not None


def test_code_that_runs_eagerly_is_in_no_trace():
    seen = []

    def look(x):
        seen.append(bool(torch._guards.TracingContext.try_get()))
        seen.append(torch._guards.detect_fake_mode() is not None)
        seen.append(torch.compiler.is_compiling())
        return x

    with uncompiled_calls():
        torch.compile(look, backend="eager")(torch.ones(1))
    assert seen == [False] * 3


def test_a_whole_graph_that_runs_eagerly_leaves_nothing_on():
    """Torch leaves on that nested compilations raise, where a call compiles nothing."""
    inner = torch.compile(sine, backend="eager")
    whole = torch.compile(sine, backend="eager", fullgraph=True)
    setting = "error_on_dynamo_callback_in_fullgraph_compiled_code"
    with torch._dynamo.config.patch({setting: True}):
        with uncompiled_calls():
            whole(torch.ones(2))
        assert not torch._C._dynamo.eval_frame.set_fullgraph_error_on_nested_compile(
            False
        )
    inner(torch.ones(2))


def test_a_compilation_may_copy_hooks_while_others_are_put_on_and_off():
    watched, is_inside = nn.Linear(2, 2), threading.Event()
    detector = DebugUnderflowOverflow(watched)

    def put_on_and_off():
        is_inside.wait(60)
        DebugUnderflowOverflow(nn.Linear(2, 2)).remove()

    def backend(graph, inputs):
        is_inside.set()
        thread.join(0.2)  # it waits for this
        copy.deepcopy(watched)
        return graph

    def compile_it():
        torch.compile(sine, backend=backend)(torch.ones(2))

    thread = threading.Thread(target=put_on_and_off, daemon=True)
    other = threading.Thread(target=compile_it, daemon=True)
    for each in (thread, other):
        each.start()
    for each in (thread, other):
        each.join(60)
        assert not each.is_alive()
    detector.remove()


class Net(nn.Module):
    """A model whose loss is non-finite where its input is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.h = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        return self.h(self.a(x).tanh()) + torch.log(x.mean(1, keepdim=True))


@pytest.mark.slow
def test_threads_explain_steps_of_compiled_models_side_by_side():
    reports, start = [], threading.Barrier(3)

    def work():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        call = torch.compile(model, backend="aot_eager")
        guard = OverflowGuard(model, optimizer, "skip")
        start.wait()
        guard.run(lambda: call(-torch.ones(4, 6)).sum()).backward()
        optimizer.step()
        reports.append(guard.last_report)
        guard.remove()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [each.explanation.op.name for each in reports] == ["aten.log"] * 3


@pytest.mark.parametrize(
    "look", [Before, script_models._existing], ids=["replay", "script"]
)
def test_other_threads_make_tuples_while_objects_are_looked_for(look):
    failed, made, is_over = [], [], threading.Event()
    own = iter([1, 2])
    interval = sys.getswitchinterval()

    def work():
        while not is_over.is_set():
            try:
                made.append(tuple(x for x in range(50)))
            except SystemError as error:  # where somebody else holds the tuple
                failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    sys.setswitchinterval(1e-5)
    try:
        for each in threads:
            each.start()
        found = [look() for _ in range(5)]
    finally:
        is_over.set()
        for each in threads:
            each.join()
        sys.setswitchinterval(interval)
    assert made and not failed
    assert look is not Before or all(each.has(own) for each in found)


@pytest.mark.slow
def test_a_text_has_a_tree_while_other_threads_make_trees():
    text = "\n".join(f"a{i} = [b.c({i}) + d for b in e]" for i in range(50))
    is_over, failed = threading.Event(), []
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()

    def work():
        while not is_over.is_set():
            with contextlib.suppress(SystemError):  # theirs is not ours to mend
                ast.parse("a = [b.c(1) + d for b in e]")
            time.sleep(0.01)

    def look():
        try:
            for _ in range(100):
                syntax.module_of(text)
        except SystemError as error:
            failed.append(error)

    def switch(phase, info):
        time.sleep(0)

    others = [threading.Thread(target=work) for _ in range(2)]
    own = [threading.Thread(target=look) for _ in range(2)]
    gc.callbacks.append(switch)  # what lets another thread run within a tree
    sys.setswitchinterval(1e-5)
    gc.set_threshold(700)
    try:
        for each in [*others, *own]:
            each.start()
        for each in own:
            each.join()
    finally:
        is_over.set()
        for each in others:
            each.join()
        gc.callbacks.remove(switch)
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)
    assert not failed


@pytest.mark.slow
@pytest.mark.parametrize("watch", ["tripwire", None])
def test_bad_steps_discard_no_compiled_code_of_others(watch):
    others, own = Backend(), Backend()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {} if watch is None else {"watch": watch}
    other = torch.compile(sine, backend=others)
    with OverflowGuard(model, optimizer, "skip", **given) as guard:
        call = torch.compile(model, backend=own, fullgraph=True)
        for number in range(2 * torch._dynamo.config.recompile_limit):
            x = torch.full((4, 6), -1.0 if number % 2 else 1.0)
            guard.run(lambda x=x: call(x).sum() / x.mean().log().sqrt()).backward()
            optimizer.step()
            optimizer.zero_grad()
            of_another_thread(lambda: other(torch.ones(2)))
        assert guard.num_skipped >= 8
        assert len(others.graphs) == 1
        assert len(own.graphs) <= 2


@pytest.mark.slow
def test_many_detectors_do_not_use_up_the_entries_that_dynamo_allows():
    model, backend = Sine(), Backend()
    call = torch.compile(lambda x: model(x), backend=backend, fullgraph=True)
    other = DebugUnderflowOverflow(nn.Linear(2, 2))  # stays on
    for _ in range(2 * torch._dynamo.config.recompile_limit):
        count = len(backend.graphs)
        detector = DebugUnderflowOverflow(model)
        call(torch.ones(2))
        assert len(backend.graphs) == count + 1
        with pytest.raises(ValueError, match="inf/nan detected"):
            call(torch.full((2,), torch.inf))
        detector.remove()
    other.remove()


# Warnings.


def test_warnings_filters_are_those_of_the_program():
    model = nn.Linear(2, 2)
    before = warnings.filters, list(warnings.filters)
    with without_observers([model]), Snapshot({"": model}):
        assert warnings.filters is before[0] and warnings.filters == before[1]


def test_a_warning_of_the_step_is_not_shown_again_by_its_replays():
    class Warns(Net):
        def forward(self, x):
            warnings.warn("of the model", stacklevel=1)
            return super().forward(x)

    model = Warns()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        warnings.catch_warnings(record=True) as shown,
        OverflowGuard(model, optimizer, "skip") as guard,
    ):
        warnings.simplefilter("default")
        guard.run(lambda: model(-torch.ones(4, 6)).sum()).backward()
        optimizer.step()
    assert guard.last_report.explanation.cause == "undefined"
    assert [str(each.message) for each in shown] == ["of the model"]


# Autocast keeps its casts of weights for all threads.


@contextlib.contextmanager
def enabled():
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", False)


def region():
    return torch.autocast("cpu", torch.bfloat16)


# What is around the loop, and what around each forward: casts may be of any step.
REGIONS = {
    "a region": (region, contextlib.nullcontext),
    "enabled": (enabled, contextlib.nullcontext),
    "a region in one": (region, region),
    "a region in enabled": (enabled, region),
    "enabled for each forward": (contextlib.nullcontext, enabled),
    "a region for each forward": (contextlib.nullcontext, region),
}
GUARDS = {
    "default": {},
    "tripwire": {"watch": "tripwire"},
    "masked": {"explain": False, "monitors": [MaskedOps(every=1)]},
}


@pytest.fixture(autouse=True)
def no_cast_is_cached():
    yield
    torch.clear_autocast_cache()


def trained(regions, bad, arguments):
    """The weights after five steps, the third of which may be bad; of two uses."""
    torch.clear_autocast_cache()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    guard = None if arguments is None else OverflowGuard(model, optimizer, **arguments)
    around, of_forward = regions
    with around():
        for number in range(5):
            x = torch.ones(4, 6) * (-1 if number == bad else 1 + number)

            def loss(x=x):
                with of_forward():
                    return model(x).float().mean()

            (loss() if guard is None else guard.run(loss)).backward()
            if guard is not None or number != bad:
                optimizer.step()
            optimizer.zero_grad()
        if guard is not None:
            assert guard.num_skipped == (bad is not None)
            guard.remove()
    return model.a.weight.detach().clone()


@pytest.mark.parametrize("arguments", GUARDS)
@pytest.mark.parametrize("regions", REGIONS)
@pytest.mark.parametrize("bad", [None, 2])
def test_weights_are_those_of_a_program_without_a_guard(bad, regions, arguments):
    given = {"on_overflow": "skip", **GUARDS[arguments]}
    bare = trained(REGIONS[regions], bad, None)
    assert torch.equal(trained(REGIONS[regions], bad, given), bare)


def cast_of(weight):
    """The cast of a weight that autocast computes with now, or has cached."""
    with torch.no_grad():
        eye = torch.eye(weight.shape[0])
        return torch.mm(eye, weight)


@pytest.mark.parametrize("is_enabled", [False, True])
def test_casts_of_another_thread_are_neither_read_nor_dropped(is_enabled):
    model = Net()
    weight = model.a.weight
    old = weight.detach().bfloat16()
    with enabled():
        assert torch.equal(cast_of(weight), old)  # and stays cached
    weight.data.mul_(2)
    with Snapshot({"": model}), region() if is_enabled else contextlib.nullcontext():
        if is_enabled:
            assert torch.equal(cast_of(weight), old * 2)

    def cached():
        with enabled():
            return cast_of(weight)

    assert torch.equal(of_another_thread(cached), old)


def test_advice_leaves_casts_alone():
    model = Net()
    with enabled():
        old = cast_of(model.a.weight)
        model.a.weight.data.mul_(2)
        torch.set_autocast_enabled("cpu", False)
        advise_precision(model, [torch.rand(4, 6) + 1])
        torch.set_autocast_enabled("cpu", True)
        assert torch.equal(cast_of(model.a.weight), old)


def test_a_weight_that_a_replay_uses_twice_is_cast_once():
    """Its gradients are added up in half precision then, as they were in the step."""
    model = Net()
    with Snapshot({"": model}), region():
        one, other = (torch.mm(torch.ones(1, 6), model.a.weight) for _ in range(2))
    assert one.grad_fn.next_functions[1] == other.grad_fn.next_functions[1]
