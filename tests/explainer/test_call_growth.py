"""How results and gradients grow from call to call, up to an overflow."""

import re

import pytest
import torch
from torch import nn

from overflow_fast import explain

pytestmark = pytest.mark.usefixtures("untried")


class Recurrent(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.inner = nn.Linear(3, 3, bias=False)
        with torch.no_grad():
            self.inner.weight.copy_(factor * torch.eye(3))

    def forward(self, x):
        for _ in range(200):
            x = self.inner(x)
        return x


def told_growth(found):
    """The factor and the number of calls that an explanation tells."""
    told = re.search(r"a factor of (\S+) a call over the (\d+) calls", found.reason)
    return float(told[1]), int(told[2])


@pytest.mark.slow
@pytest.mark.parametrize("factor", [2.0, 10.0])
def test_the_growth_of_a_recurrence(factor, as_kept):
    model = Recurrent(factor)
    found = explain(model, torch.ones(4, 3), lambda x: model(x).sum())
    assert found.cause == "range overflow"
    num = {2.0: 127, 10.0: 38}[factor]
    assert f"over the {num} calls before" in found.reason
    as_kept(found.reason)


def test_one_large_step_is_no_growth():
    class Loud(Recurrent):
        def forward(self, x):
            for i in range(20):
                x = self.inner(x * (1e39 if i == 15 else 1.0))
            return x

    model = Loud(1.0)
    found = explain(model, torch.ones(4, 3), lambda x: model(x).sum())
    assert "grew by" not in found.reason


@pytest.mark.slow
def test_a_growth_that_turns_from_call_to_call():
    model = Recurrent(1.0)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.manual_seed(1)))[0]
    model.inner.weight.data = 3 * turn
    found = explain(model, torch.ones(4, 3), lambda x: model(x).sum())
    factor, num = told_growth(found)
    assert factor == pytest.approx(3, rel=0.02) and num >= 75


@pytest.mark.slow
def test_growth_begins_where_it_begins():
    class Late(Recurrent):
        def forward(self, x):
            for i in range(200):
                x = self.inner(x * (1.0 if i > 60 else 0.5))
            return x

    model = Late(2.0)
    found = explain(model, torch.ones(4, 3), lambda x: model(x).sum())
    factor, num = told_growth(found)
    assert factor == pytest.approx(2, rel=0.1)
    assert 120 <= num <= 190


class Folded(nn.Module):
    """Its state stays small, and its gradient grows with each call."""

    def __init__(self, factor, num=200):
        super().__init__()
        self.weight = nn.Parameter(factor * torch.eye(3))
        self.num = num

    def forward(self, x):
        for _ in range(self.num):
            x = torch.remainder(x @ self.weight, 1.0)
        return x


@pytest.mark.slow
@pytest.mark.tries_remedies
@pytest.mark.parametrize("factor", [2.0, 7.0])
def test_a_gradient_that_explodes_through_time(factor, as_kept):
    model = Folded(factor)
    found = explain(model, torch.rand(4, 3), lambda x: model(x).sum())
    assert (found.cause, found.phase) == ("gradient explosion", "backward")
    as_kept(found.reason, found.words.gist())
    assert "by their norm" in found.notes[-1]
    (remedy,) = found.remedies
    assert remedy.is_recommended
    exec(remedy.code, {"model": model})
    model(torch.rand(4, 3)).sum().backward()
    assert model.weight.grad.isfinite().all()


def test_clipping_by_norm_makes_nan_of_an_inf():
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([1.0, torch.inf])
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    assert weight.grad[1].isnan()


def test_one_large_derivative_is_no_explosion():
    class Loud(Folded):
        def forward(self, x):
            for i in range(20):
                x = torch.remainder(x @ self.weight * (1e39 if i == 5 else 1.0), 1.0)
            return x

    model = Loud(1.0)
    found = explain(model, torch.rand(4, 3), lambda x: model(x).sum())
    assert found.cause != "gradient explosion" and "grew" not in str(found.evidence)


class Leaky(nn.Module):
    """Its line grows by more than its weight's own call does."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3, bias=False)
        nn.init.eye_(self.inner.weight)

    def forward(self, x):
        for _ in range(200):
            x = self.inner(x) * 2.0
        return x


@pytest.mark.tries_remedies
def test_weights_between_calls_that_grow_become_smaller():
    model = Leaky()
    found = explain(model, torch.ones(4, 3), lambda x: model(x).tanh().sum())
    assert found.op.name == "aten.mul.Tensor"
    assert [each.text for each in found.remedies if each.tried] == [
        "multiply inner.weight by 0.47, as a smaller initialization does"
    ]  # and no float64, which overflows, too, some calls later
    assert found.remedies[0].is_finite


def overflow_of(loss, x):
    model = nn.Linear(3, 3, bias=False)
    nn.init.eye_(model.weight)
    return explain(model, x, lambda x: loss(model(x)))


def divided(y):
    small = (y - 1).abs() + 1e-21
    return (y / small).cos().sum() + (y / small).pow(2).sum()


@pytest.mark.parametrize(
    "loss, told",
    [
        (divided, "with a divisor of 1e-21"),
        (lambda y: (60 * y).exp().mul(-0.5).pow(2).sum(), ".exp()` at"),
        (lambda y: (y / 1e-21).neg().pow(2).sum(), "with a divisor of 1e-21"),
    ],
)
def test_the_operation_that_made_large_numbers_at_once(loss, told, as_kept):
    found = overflow_of(loss, torch.ones(2, 3))
    assert found.op.name == "aten.pow.Tensor_Scalar" and told in found.reason
    assert f"overflowed float32 ({found.op.true_value:.3g} in" in found.words.gist()
    as_kept(found.reason)


@pytest.mark.parametrize(
    "loss, scale",
    [
        (lambda y: y.neg().pow(2).sum(), 1e20),  # the batch
        (lambda y: (y * 1e20).neg().pow(2).sum(), 1.0),  # a number that is written
        (lambda y: (y * 10**18).mul(99).pow(2).sum(), 1.0),
        (lambda y: (y * torch.tensor(10**18)).mul(99).pow(2).sum(), 1.0),
        (lambda y: y.pow(3).pow(3).pow(3).pow(3).sum(), 1e2),  # more than one
        (lambda y: (y / 1e-21).log().mul(2).exp().sum(), 1.0),  # what it was given
        (lambda y: (y / y.detach().sub(1).add(1e-4)).mul(1e9).pow(9).sum(), 1.0),
    ],
)
def test_large_numbers_that_no_operation_alone_has_made(loss, scale):
    found = overflow_of(loss, scale * torch.ones(2, 3))
    assert found.cause == "range overflow" and "made" not in found.reason


def test_an_earlier_call_of_what_overflows_is_not_said_to_be_before_it():
    def loss(y):
        for _ in range(2):
            y = (y * 30).exp()
        return y.sum()

    found = overflow_of(loss, torch.ones(2, 3))
    assert found.cause == "range overflow" and not found.reason


class Layers(nn.Module):
    """Adds to what it is given a product that its layers make ever larger."""

    def __init__(self, power, num=5):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(num))
        for each in self.layers:
            nn.init.eye_(each.weight)
        self.power = power

    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
            x = x + y.abs() ** self.power
        return x


@pytest.mark.parametrize("power, start", [(3, 2.0), (2, 8.0)])
def test_layers_each_of_which_makes_larger_numbers(power, start, as_kept):
    model = Layers(power, num=4 if power == 3 else 5)
    found = explain(
        model, torch.full((2, 3), start), lambda x: model(x).neg().pow(4).mean()
    )
    assert found.op.name == "aten.pow.Tensor_Scalar"
    assert "calls of add (test_call_growth.py:" in found.reason
    as_kept(found.words.gist())


@pytest.mark.parametrize(
    "loss",
    [
        lambda y: (y + y + y * 88.8).exp().sum(),
        lambda y: (y * 99 * 99 * 99 * 99).pow(20).sum(),  # of a line, but not again
    ],
)
def test_an_overflow_behind_usual_layers_is_not_said_to_have_grown(loss):
    model = Layers(1.0, num=6)  # as a residual does, by 2 each
    found = explain(model, torch.full((2, 3), 1.5), lambda x: loss(model(x)))
    assert found.cause == "range overflow" and "calls of" not in found.reason


def test_large_numbers_of_a_weight():
    model = nn.Linear(3, 3, bias=False)
    nn.init.constant_(model.weight, 1e20)
    found = explain(model, torch.ones(2, 3), lambda x: model(x).neg().pow(2).sum())
    assert found.cause == "range overflow" and not found.reason


@pytest.mark.tries_remedies
def test_a_guard_of_the_division_that_made_large_numbers_is_tried():
    def loss(y):
        small = (y - 1).abs() + 1e-21
        return (y / small).neg().pow(2).sum()

    found = overflow_of(loss, torch.ones(2, 3))
    assert any(
        each.text.startswith("divide by a magnitude of at least") and each.is_finite
        for each in found.remedies
    )
