"""Steps whose forward writes to what it reads: buffers of any size, weights, flags."""

import functools
import itertools
import logging
import queue
import random
import subprocess
import sys

import numpy
import pytest
import torch
from torch import nn

from overflow_fast import (
    LayerAudit,
    MaskedOps,
    NonFiniteError,
    OverflowGuard,
    advise_precision,
    assert_finite_state,
    compare_live,
    shadow,
)
from overflow_fast.state import step_start
from overflow_fast.state.random import RandomStates
from overflow_fast.state.snapshot import Snapshot

DRAWS = {
    "torch": (torch.manual_seed, lambda: float(torch.rand(()))),
    "python": (random.seed, random.random),
    "numpy": (numpy.random.seed, lambda: float(numpy.random.rand())),
}


def failed(model, loss, policy="raise", before=(), **options):
    """Trains on some losses, and on one that is bad; returns report and guard."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = OverflowGuard(model, optimizer, policy, **options)
    with guard:
        for each in before:
            guard.run(each).backward()
            optimizer.step()
            optimizer.zero_grad()
        guard.run(loss).backward()
        if policy == "raise":
            with pytest.raises(NonFiniteError) as error:
                optimizer.step()
            return error.value.report
        optimizer.step()
        return guard.last_report


class Codebook(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("ema", torch.zeros(size))

    def forward(self, x):
        y = self.linear(x) * 0 / self.ema.sum()
        self.ema += 1
        return y.sum()


@pytest.mark.parametrize("size", [1000, 2**14 + 1, 2**18, 2**18 + 1, 2**20])
def test_buffers_of_every_size_are_those_of_the_beginning_in_a_replay(size):
    model = Codebook(size)
    report = failed(model, lambda: model(torch.ones(3, 4)))
    assert report.explanation.cause == "undefined"
    assert not model.ema.any()


class ActNorm(nn.Module):
    """Initializes its weight by its first batch."""

    def __init__(self, by_data=False, size=4):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(size))
        self.is_done, self.by_data = False, by_data

    def forward(self, x):
        if not self.is_done:
            with torch.no_grad():
                own = self.log_scale.data if self.by_data else self.log_scale
                own.copy_((-torch.log(x.std(0))).repeat(len(own) // 4))
            self.is_done = True
        return x * self.log_scale[:4].exp()


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("by_data", [False, True])
def test_a_weight_that_the_forward_has_written_is_no_bad_weight(by_data, policy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), ActNorm(by_data))
    model[0].weight.data[2] = 0
    assert_finite_state(model)
    x = torch.randn(8, 4)
    report = failed(model, lambda: model(x).mean(), policy)
    found = report.explanation
    assert (found.phase, found.cause, found.module) == ("forward", "undefined", "1")
    assert found.op.name == "aten.log" and "torch.log(x.std(0))" in found.op.code
    assert "before the step" not in " ".join(found.evidence)
    assert not model[1].log_scale.any() and not model[1].is_done
    assert "not known" not in str(report) and "initialize" not in str(report)


def test_a_large_weight_that_the_forward_has_written_is_said_to_be_unknown():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), ActNorm(size=2**16))
    model[0].weight.data[2] = 0
    x = torch.randn(8, 4)
    report = failed(model, lambda: model(x).mean())
    found = report.explanation
    assert found.cause == "unknown" and found.tensor == "1.log_scale"
    assert "forward has written to 1.log_scale" in found.evidence[0]
    assert "before the step is not held" in found.notes[0]
    assert "The weight 1.log_scale could not be put back" in str(report)


def test_a_weight_that_was_bad_before_the_step_is_one():
    model = nn.Sequential(nn.Linear(4, 4), ActNorm())
    model[1].is_done = True
    model[1].log_scale.data[0] = float("inf")
    found = failed(model, lambda: model(torch.ones(8, 4)).mean()).explanation
    assert found.cause == "bad weights"
    assert "held 1 inf of 4 values before the step" in found.evidence[0]


@pytest.mark.parametrize("size", [9, 2**13])  # copied in the first steps, and not
@pytest.mark.parametrize("monitors", [[LayerAudit(1)], [MaskedOps(1)]])
def test_weights_that_embeddings_renormalize(size, monitors, caplog):
    def trained(**options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(size, 16, max_norm=0.3), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        guard = OverflowGuard(model, optimizer, **options) if options else None
        for i in range(20):
            generator = torch.Generator().manual_seed(i)
            x = torch.randint(0, size, (30,), generator=generator)
            model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if guard is not None:
            guard.remove()
        return model[0].weight.detach()

    with caplog.at_level(logging.WARNING, "overflow_fast"):
        assert trained().equal(trained(monitors=monitors))
    assert "corruption" not in caplog.text and "put back" not in caplog.text


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


class Drawing(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.linear, self.draw = nn.Linear(4, 4), draw

    def forward(self, x):
        keep = 0.0 if self.draw() < 0.3 else 1.0
        return (self.linear(x) * keep / keep).sum()


@pytest.mark.parametrize("name", DRAWS)
def test_every_global_generator_draws_the_same_in_a_replay(name):
    seed, draw = DRAWS[name]
    for number in range(2000):  # one bad draw, and only good ones after it
        seed(number)
        drawn = [draw() for _ in range(12)]
        if drawn[0] < 0.3 < min(drawn[1:]):
            break
    model = Drawing(draw)
    seed(number)
    found = failed(model, lambda: model(torch.ones(3, 4))).explanation
    assert (found.cause, found.op.name) == ("undefined", "aten.div.Tensor")


def test_the_second_of_two_normal_numbers_is_drawn_again():
    numpy.random.seed(0)
    states = [RandomStates()]
    drawn = []
    for _ in range(4):
        drawn.append(numpy.random.randn())
        states.append(RandomStates())
    for place, expected in enumerate(drawn):
        states[place].restore()
        assert not states[place].drawn()
        assert numpy.random.randn() == expected
        assert states[place].drawn() == ["numpy"]
    numpy.random.seed(1)
    assert states[-1].drawn() == ["numpy"]


class Scaled(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.first, self.drop, self.last = (
            nn.Linear(16, 16),
            Times(draw),
            nn.Linear(16, 4),
        )

    def forward(self, x):
        return self.last(self.drop(self.first(x)))


class Times(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x * self.draw()


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_make_no_difference_between_runs(name):
    seed, draw = DRAWS[name]
    seed(0)
    torch.manual_seed(0)
    model, twin, x = Scaled(draw), Scaled(draw), torch.randn(8, 16)
    twin.load_state_dict(model.state_dict())
    assert not compare_live(model, twin, x).differs
    assert "keep_in_fp32" not in str(advise_precision(model, [x]))
    shadowed = shadow(model.to(torch.bfloat16), x.bfloat16())
    assert "computes differently" not in str(shadowed)


def test_a_wrapper_has_its_attributes_again():
    """It has the name of what it wraps."""

    class DistributedDataParallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module, self.number, self.items = module, 0, []

        def forward(self, x):
            self.number += 1
            self.items.append(1)
            return self.module(x)

    DistributedDataParallel.__module__ = "torch.nn.parallel.distributed"
    model = DistributedDataParallel(nn.Linear(4, 1))
    with Snapshot({"": model}):
        model(torch.ones(1, 4))
    assert model.number == 0 and model.items == []


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.stream = nn.Linear(4, 1), iter(range(100))

    def forward(self, x):
        self.last = next(self.stream)
        return self.linear(x).sum()


def test_clean_steps_with_an_iterator_are_not_replayed(caplog):
    model = Reading()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        caplog.at_level(logging.WARNING, "overflow_fast"),
        OverflowGuard(model, optimizer, monitors=[MaskedOps(1)]),
    ):
        for _ in range(5):
            model(torch.ones(2, 4)).backward()
            optimizer.step()
    assert model.last == 4
    assert sum("`stream`" in message for message in caplog.messages) == 1


def test_a_report_names_an_iterator_that_a_replay_may_have_used():
    model = Reading()
    report = failed(model, lambda: (model(torch.ones(2, 4)) - 1e9).sqrt())
    assert any("`stream`" in note for note in report.explanation.notes)


class Replacing(nn.Module):
    """Holds what a forward must not lose or break: other weights, nested tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])

    def forward(self, x):
        y = self.linear(x).sum() * 0 / (self.nested.values().sum() - 3)
        self.linear.weight = nn.Parameter(self.linear.weight.detach() + 1)
        self.nested.mul_(2)
        return y


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_weight_that_the_forward_has_replaced_is_in_its_place_again(policy):
    model = Replacing()
    weight = model.linear.weight
    failed(model, lambda: model(torch.ones(3, 4)), policy)
    assert model.linear.weight is weight


def test_a_replay_leaves_nested_tensors_as_they_are():
    model = Replacing()
    with Snapshot({"": model}) as state:
        model(torch.ones(3, 4))
    assert state.problems == []
    assert model.nested.values().tolist() == [1, 1, 1]


def test_scripted_layers_are_not_audited():
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.LayerNorm(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, monitors=[LayerAudit(1)]) as guard:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert guard.coverage().failures == 0


def test_what_cannot_be_restored_does_not_stop_the_rest():
    model = nn.Linear(4, 4)
    model.array, model.items = numpy.zeros(2), []
    with Snapshot({"": model}) as state:
        model.array.flags.writeable = False
        model.items.append(1)
    assert model.items == []
    assert len(state.problems) == 1 and "array" in state.problems[0]


@pytest.mark.parametrize("held", [queue.Queue(), functools.lru_cache(len)])
def test_queues_and_cached_functions_are_named(held):
    model = nn.Linear(4, 4)
    model.held = held
    with Snapshot({"": model}) as state:
        assert state.lost == ["held"]


def filled():
    held = queue.Queue()
    held.put(1)
    return held


def yielding():
    while True:
        yield 1


# How each is made, how one takes from it, and whether its place can be seen.
TAKEN = {
    "a cached function": (lambda: functools.lru_cache(abs), lambda f: f(-1), True),
    "a counter": (itertools.count, next, True),
    "an iterator of a list": (lambda: iter([1, 2]), next, True),
    "an iterator of a dict": (lambda: iter({1: 2}), next, True),
    "a queue": (filled, queue.Queue.get, True),
    "a generator": (yielding, next, False),
    "a zip": (lambda: zip([1], [2], strict=True), next, False),
}


@pytest.mark.parametrize("kind", TAKEN)
@pytest.mark.parametrize("is_used", [True, False])
def test_what_a_replay_took_is_named_where_it_may_have_taken_some(kind, is_used):
    make, take, is_seen = TAKEN[kind]
    model = nn.Linear(4, 4)
    model.held = make()
    with Snapshot({"": model}) as state:
        assert state.lost == ["held"]
        if is_used:
            take(model.held)
    assert bool(state.not_restored()) == (is_used or not is_seen)
    assert all("What a replay takes from `held`" in e for e in state.not_restored())


def test_what_is_written_to_the_terminal_is_no_state():
    model = nn.Linear(4, 4)
    model.out = sys.stderr
    with Snapshot({"": model}) as state:
        assert state.lost == state.not_restored() == []


FIRST_DRAW = """
import sys
import numpy, torch, overflow_fast
from torch import nn

assert "numpy.random" not in sys.modules or {loads}

class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x) * numpy.random.rand()

model = Dropped()
print(overflow_fast.compare_live(model, model, torch.ones(2, 4)).first)
"""


def test_a_generator_whose_first_draw_is_in_the_forward_is_restored():
    loads = numpy.__version__.startswith("1.")  # it imports all at once
    command = [sys.executable, "-c", FIRST_DRAW.format(loads=loads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None"]


class Setting(nn.Module):
    """Sets an attribute in its first call, or in each with autograd."""

    def __init__(self, is_counter):
        super().__init__()
        self.linear, self.is_counter, self.calls = nn.Linear(4, 4), is_counter, 0

    def forward(self, x):
        if torch.is_grad_enabled() and (self.is_counter or not self.calls):
            self.calls += 1
        return self.linear(x)


def test_attributes_are_kept_in_each_step_while_they_change(monkeypatch):
    kept = []

    class Noted(step_start.KeptAttributes):
        def __init__(self, module):
            super().__init__(module)
            kept.append(module)

    monkeypatch.setattr(step_start, "KeptAttributes", Noted)
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
    assert in_steps[1] == in_steps[3] == {once, counter}
    assert in_steps[7] == in_steps[-1] == {counter}
