"""A step that is skipped or raises is undone, also where nothing explains it."""

import array
import collections
import functools
import random
import tracemalloc
import types

import numpy
import pytest
import torch
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard, assert_finite_state
from overflow_fast.guard.undo import attributes, model_restore_point

pytestmark = pytest.mark.explains


@pytest.mark.parametrize("fault", ["loss", "input", "gradient"])
def test_a_run_that_catches_the_error_goes_on_as_if_the_step_had_not_been(fault):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer):
        for step in range(5):
            before = {k: v.clone() for k, v in model.state_dict().items()}
            x, is_bad = torch.randn(8, 4), step in (0, 3)
            if is_bad and fault == "input":
                x[3] = float("inf")
            loss = model(x).pow(2).mean()
            if is_bad and fault == "loss":
                loss = loss.sub(1e9).sqrt()
            loss.backward()
            if is_bad and fault == "gradient":
                model[0].weight.grad[0, 0] = float("nan")
            if not is_bad:
                optimizer.step()
            else:
                with pytest.raises(NonFiniteError):
                    optimizer.step()
            now = model.state_dict()
            assert is_bad == all(now[key].equal(value) for key, value in before.items())
            optimizer.zero_grad()
    assert_finite_state(model, optimizer)


class Initialized(nn.Module):
    """Sets its weights and what it notes beside them by its first batch."""

    def __init__(self, by_data):
        super().__init__()
        self.scale, self.shift = (
            nn.Parameter(torch.ones(4)),
            nn.Parameter(torch.ones(4)),
        )
        self.by_data, self.is_done = by_data, False
        self.seen, self.settings, self.last = [], {"calls": 0}, torch.zeros(4)
        self.draws, self.counts = random.Random(0), numpy.zeros(2)
        self.note = functools.partial(self.seen.append, "called")

    def forward(self, x):
        if not self.is_done:
            with torch.no_grad():
                (self.scale.data if self.by_data else self.scale).copy_(1 / x.mean(0))
            self.shift = nn.Parameter(self.shift.detach() + 1)
            self.is_done = True
            self.note()
            self.settings["calls"] += 1
            self.last.copy_(x[0])
            self.draws.random()
            self.counts += 1
        return x * self.scale + self.shift

    def facts(self):
        held = self.scale.tolist(), self.shift.tolist(), self.last.tolist()
        plain = self.is_done, list(self.seen), dict(self.settings)
        return held, plain, self.draws.getstate(), self.counts.tolist()


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("by_data", [False, True])
def test_weights_that_a_forward_sets_are_undone_with_the_modules_own_notes(
    by_data, policy
):
    own = Initialized(by_data)
    model = nn.Sequential(nn.Linear(4, 4), own)
    before, shift = own.facts(), own.shift
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, policy, explain=False):
        model(torch.full((2, 4), float("nan"))).sum().backward()
        if policy == "skip":
            optimizer.step()
        else:
            with pytest.raises(NonFiniteError):
                optimizer.step()
    assert own.facts() == before and own.shift is shift
    assert own.note.func.__self__ is own.seen


class Setting(nn.Module):
    """Sets an attribute in its first call, or in each with autograd."""

    def __init__(self, is_counter):
        super().__init__()
        self.linear, self.is_counter, self.calls = nn.Linear(4, 4), is_counter, 0

    def forward(self, x):
        if torch.is_grad_enabled() and (self.is_counter or not self.calls):
            self.calls += 1
        return self.linear(x)


SIZED = {
    "a NumPy array": lambda n: numpy.zeros(n),
    "a NumPy array of objects": lambda n: numpy.array([None] * n),
    "an array": lambda n: array.array("d", bytes(8 * n)),
    "bytes": lambda n: bytearray(8 * n),
    "a list": lambda n: [0] * n,
    "a dict": lambda n: dict.fromkeys(range(n), 0),
    "a deque": lambda n: collections.deque([0] * n),
    "a list in an object": lambda n: types.SimpleNamespace(items=[0] * n),
}


@pytest.mark.parametrize("name", SIZED)
def test_a_clean_step_does_not_read_what_is_too_large_to_be_kept(name):
    module = nn.Module()
    module.value = SIZED[name](2**20)
    tracemalloc.start()
    kept = attributes.KeptAttributes(module)
    assert not kept.has_changed()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**17  # a copy has 2**23
    before, module.value = module.value, None
    kept.restore()
    assert module.value is None  # it was not held either
    del before


@pytest.mark.parametrize("name", SIZED)
def test_what_is_small_is_put_back(name):
    module = nn.Module()
    module.value = SIZED[name](8)
    kept, before = attributes.KeptAttributes(module), repr(module.value)
    is_object = isinstance(module.value, types.SimpleNamespace)
    (module.value.items if is_object else module.value)[0] = 1
    assert kept.has_changed() and repr(module.value) != before
    kept.restore()
    assert repr(module.value) == before


def test_attributes_are_kept_in_each_step_once_they_have_changed(monkeypatch):
    kept = []

    class Noted(model_restore_point.KeptAttributes):
        def __init__(self, module):
            super().__init__(module)
            kept.append(module)

    monkeypatch.setattr(model_restore_point, "KeptAttributes", Noted)
    once, counter = Setting(is_counter=False), Setting(is_counter=True)
    model = nn.Sequential(once, counter, nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    in_steps = []

    def step():
        kept.clear()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        in_steps.append(set(kept))

    with OverflowGuard(model, optimizer, explain=False):
        for _ in range(20):
            step()
        with torch.no_grad():
            for _ in range(120):
                model(torch.ones(2, 4))
        step()
    assert in_steps[1] == in_steps[3] == in_steps[-1] == {once, counter}
