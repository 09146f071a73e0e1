"""A compiled model runs with its guard's hooks beside a twin that shares its code."""

import copy

import pytest
import torch
from torch import nn

from overflow_fast import OverflowGuard

INF = float("inf")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.last = nn.Linear(4, 1)

    def __getitem__(self, place):
        return self.body[place]

    def forward(self, x):
        return self.last(self.body(x))


def plain():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))


def model_of(make=plain):
    torch.manual_seed(0)
    return make()


def whole(model, backend):
    return torch.compile(model, backend=backend)


def method(model, backend):
    model.compile(backend=backend)
    return model


def parts(model, backend):
    for module in model.children():
        module.compile(backend=backend)
    return model


def called(model, x):
    return model(x)


def function(model, backend):
    """One function for both models, whose compiled code they share."""
    compiled = torch.compile(called, backend=backend)
    return lambda x: compiled(model, x)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Run:
    """A model that is trained, with or without a guard."""

    def __init__(self, model, wrap, backend):
        self.model = model
        self.called = wrap(model, backend)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.guard = None

    def watch(self):
        self.guard = OverflowGuard(self.model, self.optimizer, "skip", explain=False)
        return self

    def step(self, x):
        self.called(x).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def inputs(num):
    torch.manual_seed(1)
    return [torch.randn(5, 4) for _ in range(num)]


# A boundary is dynamo's: what follows it sees each way of compiling once. A Sequential
# has no forward of its own. Each of the four orders is seen in two ways of compiling.
KINDS = [
    (whole, Net, True, False, "eager"),
    (whole, plain, False, True, "eager"),
    (method, Net, False, True, "eager"),
    (method, plain, True, False, "eager"),
    (parts, Net, False, False, "eager"),
    (parts, plain, True, True, "eager"),
    (function, Net, True, True, "eager"),
    (function, plain, False, False, "eager"),
    pytest.param(whole, Net, False, False, "aot_eager", marks=pytest.mark.slow),
    pytest.param(function, Net, True, False, "aot_eager", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("wrap", "make", "is_late", "is_first", "backend"), KINDS)
def test_the_guarded_one_keeps_its_boundary(wrap, make, is_late, is_first, backend):
    own, twin = (Run(model_of(make), wrap, backend) for _ in range(2))
    if not is_late:
        own.watch()
    order = [twin, own] if is_first else [own, twin]
    batches = inputs(4)
    for each in order:
        each.step(batches[0])
    if is_late:
        own.watch()
    for batch in batches[1:]:
        for each in order:
            each.step(batch)
    twin.step(batches[0] * INF)  # nobody watches it
    assert own.guard.num_skipped == 0
    before = own.model[1].running_mean.clone()
    own.step(batches[0] * INF)
    assert own.guard.num_skipped == 1
    assert torch.equal(own.model[1].running_mean, before)
    for batch in batches:
        twin.step(batch)
        own.step(batch)
    assert own.guard.num_skipped == 1
    assert not twin.model[1].running_mean.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("no_grad", [True, False])
def test_an_average_of_the_model(no_grad):
    own = Run(model_of(), whole, "eager").watch()
    average = torch.compile(copy.deepcopy(own.model), backend="eager")
    for batch in inputs(3):
        with torch.set_grad_enabled(not no_grad):
            average(batch * INF)
        own.step(batch)
    assert own.guard.num_skipped == 0
    own.step(inputs(1)[0] * INF)
    assert own.guard.num_skipped == 1
    assert own.model[1].running_mean.isfinite().all()


def test_two_guards_on_two_twins():
    runs = [Run(model_of(), whole, "eager").watch() for _ in range(2)]
    for number, batch in enumerate(inputs(6)):
        runs[0].step(batch * INF if number == 2 else batch)
        runs[1].step(batch * INF if number in (1, 4) else batch)
    assert [run.guard.num_skipped for run in runs] == [1, 2]
    assert all(run.model[1].running_mean.isfinite().all() for run in runs)


@pytest.mark.slow
def test_a_guard_that_is_removed_and_made_again():
    own, twin = (Run(model_of(), whole, "eager") for _ in range(2))
    batches = inputs(3)
    for num_guards in range(3):
        own.watch()
        for batch in batches:
            twin.step(batch)
            own.step(batch)
        own.step(batches[0] * INF)
        assert own.guard.num_skipped == 1, num_guards
        own.guard.remove()
        guard, own.guard = own.guard, None
        own.step(batches[0])
        assert guard.num_skipped == 1


def test_a_twin_is_no_reason_to_compile_again():
    own, twin = Run(model_of(), whole, "eager").watch(), Run(model_of(), whole, "eager")
    batches = inputs(8)
    for batch in batches[:2]:
        own.step(batch)
        twin.step(batch)
    torch._dynamo.utils.counters.clear()
    for batch in batches:
        own.step(batch)
        twin.step(batch)
    counters = torch._dynamo.utils.counters
    assert not counters["stats"].get("unique_graphs") and not counters["graph_break"]
