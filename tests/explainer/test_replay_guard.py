"""A guard's alarms are explained by a replay, of which nothing is left afterwards."""

import json
import pickle
import random
import types
from typing import ClassVar

import numpy
import pytest
import torch
from guarding import assert_same, hooks_of, report_from, state_of
from pairs import pairs
from torch import nn

from overflow_fast import Explanation, NonFiniteError, OverflowGuard
from overflow_fast.options import Explain

INF, NAN = float("inf"), float("nan")


FAULT = {}  # of the machine: what a module holds is put back for a replay


class Scale(nn.Module):
    """Multiplies by a number that a test sets, and leaves traces of each call."""

    def __init__(self, width=4):
        super().__init__()
        self.factor = 1.0
        FAULT.clear()
        self.num_calls = 0
        self.seen = []
        self.register_buffer("total", torch.zeros(width))
        self.sum = torch.zeros(())  # as metrics keep their state

    def forward(self, x):
        self.num_calls += 1
        self.seen.append(len(self.seen))
        self.last = x.detach()
        self.sum += self.last.sum()
        self.total += x.detach().abs().mean(0) + random.random()
        self.total += numpy.random.rand()
        factor = FAULT.pop("factor", self.factor)
        return x * factor


def make():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 4), Scale(), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def data(seed=1):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))


def step(guard, model, optimizer, x, runs=True):
    optimizer.zero_grad()
    compute = lambda: model(x).pow(2).mean()  # noqa: E731
    loss = guard.run(compute) if runs else compute()
    loss.backward()
    optimizer.step()


def explained(guard, *arguments, **options):
    return report_from(lambda: step(guard, *arguments, **options)).explanation


def place(found):
    op = None if found.op is None else found.op.name
    return found.phase, found.cause, op, found.module


# What it says.


@pytest.mark.parametrize("runs", [True, False])
def test_an_alarm_is_explained(model, optimizer, runs):
    guard = OverflowGuard(model, optimizer)
    step(guard, model, optimizer, data(), runs=runs)
    model[1].factor = 1e38
    found = explained(guard, model, optimizer, 1e3 * data(), runs=runs)
    expected = ("forward", "range overflow", "aten.mul.Tensor", "1")
    assert place(found) == expected
    assert found.op.code == "return x * factor"
    report = guard.last_report
    assert "\n".join(found.words.rows()) in str(report)
    assert json.loads(report.to_json())["explanation"]["cause"] == "range overflow"
    assert pickle.loads(pickle.dumps(report)).explanation.op == found.op


def test_nothing_is_kept_or_explained_where_it_is_not_asked_for(model, optimizer):
    guard = OverflowGuard(model, optimizer, explain=False)
    model[1].factor = NAN
    assert explained(guard, model, optimizer, data()) is None
    assert guard._parts.keeper is None


def test_a_batch_is_let_go_when_its_step_is_judged(model, optimizer):
    guard = OverflowGuard(model, optimizer)
    for runs in (True, False):
        step(guard, model, optimizer, data(), runs=runs)
        assert guard._parts.keeper.calls == []


@pytest.mark.slow
def test_auto_explains_each_place_once_and_one_in_100_steps(model, optimizer):
    guard = OverflowGuard(model, optimizer, "skip")
    had = []
    for i in range(4):
        model[1].factor = NAN if i < 3 else 1.0
        guard.step = i if i < 2 else 100 + i
        x = data()
        x[0] = NAN if i == 3 else x[0]
        step(guard, model, optimizer, x)
        had.append(guard.last_report.explanation is not None)
    assert had == [True, False, False, True]


@pytest.mark.slow
def test_true_explains_always(model, optimizer):
    guard = OverflowGuard(model, optimizer, "skip", explain=True)
    for _ in range(3):
        model[1].factor = NAN
        step(guard, model, optimizer, data())
        assert guard.last_report.explanation.cause == "constant"


def test_a_callable_policy_is_given_the_explanation(model, optimizer):
    seen = []
    guard = OverflowGuard(
        model, optimizer, lambda report: seen.append(report.explanation) or "skip"
    )
    model[1].factor = NAN
    step(guard, model, optimizer, data())
    assert isinstance(seen[0], Explanation)


def test_what_happens_once_is_not_reproducible(model, optimizer, as_kept):
    guard = OverflowGuard(model, optimizer)
    step(guard, model, optimizer, data())
    FAULT["factor"] = NAN
    found = explained(guard, model, optimizer, data())
    assert place(found) == ("forward", "not reproducible", None, "1")
    assert found.replays == 4
    as_kept(found.evidence)


def test_an_epsilon_that_is_0_in_float16(as_kept):
    model = nn.Linear(4, 1).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    guard = OverflowGuard(model, optimizer)
    x = data().half()
    x[:, 1] = 0  # a weight without a gradient
    step(guard, model, optimizer, x)
    found = explained(guard, model, optimizer, x)
    assert place(found) == ("optimizer", "underflow", "aten.addcdiv_", "")
    assert found.tensor == "weight"
    as_kept(found.evidence)


def test_gradients_that_overflow_as_they_are_added_up():
    model = nn.Linear(4, 1).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = OverflowGuard(model, optimizer)
    x = torch.full((2, 4), 1e4).half()
    for _ in range(3):
        guard.run(lambda: 4 * model(x).float().mean()).backward()
    found = report_from(optimizer.step).explanation
    assert (found.cause, found.op.name) == ("range overflow", "aten.add_.Tensor")


def test_models_that_call_each_other():
    torch.manual_seed(0)
    models = {"a": nn.Linear(4, 4), "b": nn.Sequential(nn.Linear(4, 4), Scale())}
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models.values()]
    guard = OverflowGuard(models, optimizers)
    models["b"][1].factor = 3e38
    models["b"](models["a"](100 * data())).sum().backward()
    found = report_from(optimizers[0].step).explanation
    assert place(found)[1:] == ("range overflow", "aten.mul.Tensor", "b.1")
    assert guard.num_skipped == 0


# What it does not say.


@pytest.mark.parametrize("nan", [True, False])
def test_a_loss_that_cannot_be_replayed_is_not_blamed_on_anything(nan):
    model, optimizer = make()
    guard = OverflowGuard(model, optimizer)
    assert guard.enabled
    out = model(data())
    loss = (out * NAN).sum() if nan else out.sum() + (0 * model[0].weight).norm(p=0.5)
    loss.backward()
    model[0].weight.grad[0] = NAN
    found = report_from(optimizer.step).explanation
    assert (found.cause, found.op) == ("unknown", None)
    assert "guard.run(lambda: loss)" in str(found)


def test_a_batch_that_was_written_to_is_told(model, optimizer, as_kept):
    guard = OverflowGuard(model, optimizer)
    x = data()
    x[0] = NAN
    guard.run(lambda: model(x).sum()).backward()
    with torch.no_grad():
        x[0] = 0
    found = report_from(optimizer.step).explanation
    assert (found.cause, found.phase) == ("unknown", "")
    as_kept(found.notes)


def test_what_a_module_does_once_it_does_in_a_replay_too():
    class Once(nn.Module):
        is_first = True

        def forward(self, x):
            factor, self.is_first = NAN if self.is_first else 1.0, False
            return x * factor

    model = nn.Sequential(nn.Linear(4, 4), Once())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found = explained(OverflowGuard(model, optimizer), model, optimizer, data())
    assert place(found) == ("forward", "constant", "aten.mul.Tensor", "1")
    assert not model[1].is_first


def test_a_forward_that_was_not_kept_is_not_said_to_be_finite(as_kept):
    model, optimizer = make()
    guard = OverflowGuard(model, optimizer)
    FAULT["factor"] = NAN
    for _ in range(10):
        guard.run(lambda: model(data()).sum()).backward()
    found = report_from(optimizer.step).explanation
    assert found.cause == "unknown"
    as_kept(found.notes)


def test_a_replay_that_raises_is_a_sentence(model, optimizer, as_kept):
    guard = OverflowGuard(model, optimizer)
    once = [None]
    model[1].factor = NAN
    guard.run(lambda: (once.pop(), model(data()).sum())[1]).backward()
    found = report_from(optimizer.step).explanation
    assert found.cause == "unknown"
    as_kept(found.notes)


def test_nothing_is_replayed_where_other_ranks_would_not_join(monkeypatch, as_kept):
    monkeypatch.setattr("overflow_fast.explainer.questions.world_size", lambda: 2)
    model, optimizer = make()
    model[1].factor = NAN
    found = explained(OverflowGuard(model, optimizer), model, optimizer, data())
    assert (found.cause, found.replays) == ("unknown", 0)
    as_kept(found.notes)


@pytest.mark.parametrize("budget", [2, 3, 8])
def test_the_budget(model, optimizer, budget):
    model[1].factor = NAN
    guard = OverflowGuard(model, optimizer, explain=Explain(budget=budget))
    found = explained(guard, model, optimizer, data())
    assert (found.cause, found.op.name) == ("constant", "aten.mul.Tensor")
    more = 1 if budget >= 8 else 0  # in float64
    assert found.replays <= budget + more


# What is left of it: nothing.


def whole_state(model, optimizer):
    attributes = {
        key: value if not isinstance(value, list) else list(value)
        for key, value in vars(model[1]).items()
        if isinstance(value, (int, float, list, torch.Tensor))
    }
    numpys = numpy.random.get_state()
    return {
        **state_of(model, optimizer),
        "gradients": [
            p.grad if p.grad is None else p.grad.clone() for p in model.parameters()
        ],
        "random": [
            torch.get_rng_state(),
            list(random.getstate()[1]),
            numpys[1].tolist(),
        ],
        "attributes": attributes,
        "training": [module.training for module in model.modules()],
        "versions": [t._version for t in [*model.parameters(), *model.buffers()]],
    }


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "NAdam": torch.optim.NAdam,
    "Rprop": torch.optim.Rprop,
}


def run_bad(explain, make_optimizer, policy, factor, flaky):
    for each in (torch.manual_seed, random.seed, numpy.random.seed):
        each(0)
    model, _ = make()
    optimizer = make_optimizer(model.parameters())
    guard = OverflowGuard(model, optimizer, policy, explain=explain)
    step(guard, model, optimizer, data())
    if flaky:
        FAULT["factor"] = factor
    else:
        model[1].factor = factor
    step(guard, model, optimizer, data())
    model[1].factor = 1.0
    after = whole_state(model, optimizer)
    if policy == "skip":
        step(guard, model, optimizer, data(2))
    state = after, whole_state(model, optimizer), hooks_of(model, optimizer)
    numbers = guard.num_skipped, guard.step, guard.coverage().steps_watched
    return state, numbers, guard


@pytest.mark.parametrize(
    "optimizer, policy, flaky", pairs(list(OPTIMIZERS), ("skip", "warn"), (True, False))
)
def test_everything_is_put_back(optimizer, policy, flaky):
    arguments = OPTIMIZERS[optimizer], policy, NAN, flaky
    state, numbers, guard = run_bad(True, *arguments)
    expected, expected_numbers, _ = run_bad(False, *arguments)
    assert guard._parts.keeper is not None
    assert numbers == expected_numbers
    for each, other in zip(state, expected, strict=True):
        assert_same(each, other)


def test_gradients_are_the_same_objects_and_nothing_steps_in_backward(model):
    stepped = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(stepped.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = OverflowGuard(model, optimizer, "skip")
    guard.run(lambda: (model(data()) * 0).abs().sqrt().sum()).backward()
    gradients = [p.grad for p in model.parameters()]
    count = len(stepped)
    optimizer.step()
    assert guard.last_report.explanation.cause == "singular gradient"
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert len(stepped) == count
    model(data()).sum().backward()
    assert len(stepped) == 2 * count


@pytest.mark.slow
def test_another_guard_sees_nothing_of_it(model, optimizer):
    first = OverflowGuard(model, optimizer, "skip")
    second = OverflowGuard(model, optimizer, "skip")
    model[1].factor = NAN
    step(first, model, optimizer, data())
    model[1].factor = 1.0
    step(first, model, optimizer, data())
    assert not first.last_step_skipped
    assert not second.last_step_skipped


# guard.run().


def test_run_returns_what_the_function_returns(model, optimizer):
    guard = OverflowGuard(model, optimizer)
    assert guard.run(lambda: "anything") == "anything"
    guard.disable()
    assert guard.run(lambda: 3) == 3


def test_run_hands_on_an_exception(model, optimizer):
    guard = OverflowGuard(model, optimizer)
    with pytest.raises(ZeroDivisionError):
        guard.run(lambda: 1 / 0)
    step(guard, model, optimizer, data())
    assert guard.last_report is None


def test_run_sees_a_loss_whose_gradients_are_finite(model, optimizer):
    guard = OverflowGuard(model, optimizer)
    guard.run(lambda: model(data()).sum() + torch.tensor(NAN)).backward()
    assert report_from(optimizer.step).explanation.phase == "forward"


def test_run_takes_a_function(as_kept):
    as_kept.error(TypeError, OverflowGuard(*make()).run, torch.ones(1))


# What a function reads is what it read in the step.

ACCUMULATED = """
import torch
from torch import nn

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [torch.ones(3, 2) for _ in range(4)]
batches[1][2] = float("nan")
scale = 1.0


def loss_of():
    return (model(x) * scale).mean()


def train(guard, way):
    global x, scale
    for i, x in enumerate(batches):
        scale = float(i == 1)
        if way == "globals":
            loss = guard.run(lambda: (model(x) * scale).mean())
        elif way == "function":
            loss = guard.run(loss_of)
        elif way == "nested":
            loss = guard.run(lambda: loss_of() / 4)
        elif way == "index":
            loss = guard.run(lambda: sum(model(batches[i]).mean() for _ in range(1)))
        loss.backward()
    if way != "index":
        del x
    optimizer.step()


def train_cells(guard):
    for x in batches:
        inner = lambda: model(x).mean()
        guard.run(lambda: inner() / 4).backward()
    optimizer.step()
"""


@pytest.mark.parametrize("way", ["globals", "function", "nested", "index", "cells"])
def test_a_loop_that_has_gone_on_does_not_change_the_replay(way, tmp_path):
    path = tmp_path / "accumulated.py"
    path.write_text(ACCUMULATED)
    space = {"__name__": "accumulated"}
    exec(compile(ACCUMULATED, str(path), "exec"), space)
    guard = OverflowGuard(space["model"], space["optimizer"])
    with pytest.raises(NonFiniteError) as error:
        if way == "cells":
            space["train_cells"](guard)
        else:
            space["train"](guard, way)
    found = error.value.report.explanation
    assert (found.phase, found.cause) == ("data", "bad data"), found
    assert found.sample == 2 or way == "index"


@pytest.mark.parametrize("options", [{"watch": "tripwire"}, {}])
def test_what_a_module_returned_arose_in_the_forward_though_the_loss_leaves_it_out(
    options,
):
    """Rows of 0 over their norm: nan that a finite loss masks, and backward meets."""

    class Unit(nn.Module):
        def forward(self, x):
            return x / x.norm(dim=-1, keepdim=True)

    model = nn.Sequential(nn.Linear(4, 4, bias=False), Unit(), nn.Linear(4, 1))
    x = torch.ones(3, 4)
    x[1] = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = OverflowGuard(model, optimizer, **options)
    loss = guard.run(lambda: model(x)[[0, 2]].mean())
    assert loss.isfinite()
    loss.backward()
    with pytest.raises(NonFiniteError, match="`output` of 1 ") as error:
        optimizer.step()
    found = error.value.report.explanation
    named = found.phase, found.cause, found.module, found.op.name
    assert named == ("forward", "undefined", "1", "aten.div.Tensor")
    assert "in backward" not in str(found)


class Square(nn.Module):
    def forward(self, x):
        return x.square()


def test_the_sample_is_found_where_an_output_of_minus_inf_is_left_to_the_loss():
    """The forward alone does not show it: an output of -inf may be a mask's."""
    model = nn.Sequential(Square(), nn.Linear(1, 1, bias=False))
    nn.init.constant_(model[1].weight, -1.0)
    x = torch.ones(4, 1)
    x[2] = 1e30
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = explained(OverflowGuard(model, optimizer), model, optimizer, x, runs=False)
    assert (found.module, found.sample) == ("0", 2)


# Generators of the program's own.


class Given:  # a class is not put back
    tensors: ClassVar = []


class Noise:
    def __init__(self, generator):
        self.generator = generator

    def __call__(self, x):
        return x + torch.randn(x.shape, generator=self.generator)

    def drawn(self, x):
        return torch.from_numpy(self.generator.normal(size=x.shape)).float() + x


def given_with(noise):
    """What a model was given in a bad step, and in its replays."""
    model = nn.Linear(4, 4)
    Given.tensors.clear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guard = OverflowGuard(model, optimizer)
    x = data()

    def compute():
        Given.tensors.append(noise(x))
        return model(Given.tensors[-1]).log().sum()

    guard.run(compute).backward()
    with pytest.raises(NonFiniteError):
        optimizer.step()
    return Given.tensors


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_replay_begins_with_the_states_of_the_programs_own_generators(kind):
    generator = torch.Generator() if kind == "torch" else numpy.random.default_rng(1)
    noise = Noise(generator)
    first, *again = given_with(noise if kind == "torch" else noise.drawn)
    again = [each for each in again if each.shape == first.shape]  # not of one sample
    assert len(again) > 1
    assert all(torch.allclose(first, each.float()) for each in again)


def drawn_by_default(x, generator=torch.Generator()):  # noqa: B008
    return Noise(generator)(x)


def drawn_in_another_module(x):
    return helper.noise(x)


helper = types.ModuleType("helper")
helper.__file__ = __file__
helper.noise = Noise(torch.Generator())


@pytest.mark.parametrize(
    ("noise", "generator"),
    [
        (drawn_by_default, drawn_by_default.__defaults__[0]),
        (drawn_in_another_module, helper.noise.generator),
    ],
)
def test_a_replay_leaves_generators_as_the_step_did(noise, generator):
    generator.manual_seed(0)
    noise(data())
    after = generator.get_state()
    generator.manual_seed(0)
    assert len(given_with(noise)) > 1
    assert torch.equal(generator.get_state(), after)
