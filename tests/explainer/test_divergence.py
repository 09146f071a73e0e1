"""Runs that diverge: which of loss, gradients and update has grown first."""

import re

import pytest
import torch
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.options import Explain, Schedule


class Wild(torch.optim.SGD):
    """Steps as SGD does, and from one step on in another way."""

    def __init__(self, params, at, divides=None, **settings):
        super().__init__(params, **settings)
        self.at, self.divides, self.number = at, divides, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.number += 1
        if self.number <= self.at or self.divides is None:
            return super().step(closure)
        for p in self.param_groups[0]["params"]:
            unit = p.grad.abs().max() / 12  # a moment on a grid, which may be 0
            moment = (p.grad.abs() / unit).round() * unit
            p -= self.divides * p.grad / (moment + 1e-8)
        return None


def diverged(at=0, spike=1.0, policy="raise", num_bad=0, **arguments):
    """The explanation of a run that diverges from step `at` on, and its end."""
    guarding = {k: arguments.pop(k) for k in ("schedule",) if k in arguments}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    arguments = {"lr": 1e-4, **arguments}
    optimizer = Wild(model.parameters(), at, **arguments)
    guard = OverflowGuard(
        model, optimizer, policy, explain=Explain("always"), **guarding
    )
    for step in range(300):
        x = torch.randn(16, 8) * (spike if step == at else 1.0)
        x[0] = float("nan") if 20 <= step < 20 + num_bad else x[0]
        guard.run(lambda x=x: (model(x) - x[:, :1]).pow(2).mean()).backward()
        try:
            optimizer.step()
        except NonFiniteError:
            break
        optimizer.zero_grad()
        if guard.num_skipped > num_bad:
            break
    guard.remove()
    return guard.last_report.explanation


def order_of(found):
    texts = [each for each in found.evidence if each.startswith("grew tenfold first")]
    kinds = "the loss|gradients|the weights, by the update or other code,"
    return re.findall(kinds, texts[0]) if texts else []


@pytest.mark.parametrize("at", [0, 5, 40])
def test_an_update_that_grows_alone_is_named_first(at, as_kept):
    found = diverged(at, divides=1e-5)
    assert found.cause == "divergence"
    as_kept(order_of(found)[0])


@pytest.mark.parametrize("at", [3, 40])
def test_a_batch_that_makes_the_loss_grow_is_named_first(at):
    found = diverged(at, 1e4, lr=0.1)
    assert found.cause == "divergence"
    assert order_of(found)[0] == "the loss", found


def test_growth_that_began_before_the_first_known_step_has_no_first(as_kept):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    guard = OverflowGuard(model, optimizer)
    with pytest.raises(NonFiniteError) as raised:
        for _ in range(200):  # each step takes the weights 10 times as far
            x = torch.randn(8, 4)
            (model(x).squeeze(1) - x.sum(1)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = raised.value.report.explanation
    as_kept(found.reason)
    assert found.cause == "divergence" and order_of(found) == []
    guard.remove()


def test_a_weight_that_has_grown_is_told_by_what_it_was_itself():
    model = nn.ParameterDict({"grows": torch.tensor(0.01), "stays": torch.tensor(1.0)})
    optimizer = torch.optim.SGD(model.parameters(), lr=50.0)
    guard = OverflowGuard(model, optimizer)
    with pytest.raises(NonFiniteError, match=r"from 0\.01 to .* \(grows\)"):
        for _ in range(20):
            guard.run(lambda: -10 * model["grows"] ** 2 * model["stays"]).backward()
            model["stays"].grad = None
            optimizer.step()
            optimizer.zero_grad()
    guard.remove()


def error_of(rate, factor, told, **settings):
    """The error of a line trained by SGD at a rate that a schedule multiplies."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, **settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    sign = -1 if settings.get("maximize") else 1

    def loss(x):
        return sign * (model(x)[:, 0] - x.sum(1)).pow(2).mean()

    with (
        OverflowGuard(model, optimizer) as guard,
        pytest.raises(NonFiniteError, match=told) as raised,
    ):
        for _ in range(200):
            x = torch.randn(8, 4)
            guard.run(lambda x=x: loss(x)).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return str(raised.value)


def test_a_learning_rate_below_0_is_told_and_nobody_is_to_lower_it():
    told = r"a learning rate below 0 in [^$]*keep the learning rate above 0"
    assert "lower" not in error_of(1.0, lambda step: 0.1 - step, told)


def test_a_learning_rate_below_0_of_what_is_maximized_is_no_reason():
    """It goes down the loss; the rate is too large."""
    text = error_of(10.0, lambda step: -1.0, "Divergence", maximize=True)
    assert "below 0" not in text and "above 0" not in text


def test_a_learning_rate_that_has_risen_is_told():
    error_of(2.0, lambda step: step + 1, r"rose from 2 to [^$]*rise less")


@pytest.mark.parametrize(
    ("beta2", "amsgrad", "told"),
    [
        (
            *(0.01, False),
            r"in the last one by .* times the learning rate 0\.1\.[^$]*set beta2",
        ),
        (0.999, False, r"at a learning rate of 0\.1\.[^$]*lower the learning rate"),
        (0.01, True, r"at a learning rate of 0\.1\.[^$]*lower the learning rate"),
    ],
)
def test_an_update_that_betas_leave_without_bound_is_told(beta2, amsgrad, told):
    """The gradient falls, and Adam's divisor falls faster; or other code writes."""
    model = nn.ParameterDict({"w": torch.full([1], 0.1)})
    settings = {"betas": (0.9, beta2), "amsgrad": amsgrad}
    optimizer = torch.optim.Adam(model.parameters(), 0.1, **settings)
    guard = OverflowGuard(model, optimizer)

    def loss(slope):
        return (slope * model["w"] + 0 * model["w"].abs().exp()).sum()

    with pytest.raises(NonFiniteError, match=told):
        for step in range(15):
            guard.run(lambda step=step: loss(1.0 if step < 9 else 1e-5)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if "lower" in told and step == 12:
                model["w"].data.mul_(1e3)
    guard.remove()


def test_steps_that_were_not_watched_leave_it_open():
    found = diverged(divides=1e-7, schedule=Schedule(2))
    assert "watched steps" in found.reason and order_of(found) == []


@pytest.mark.parametrize("num_bad", [0, 3])
def test_steps_that_were_skipped_leave_it_open(num_bad):
    """Their loss is in no row of numbers, and it is not known where it is missing."""
    found = diverged(30, policy="skip", divides=1e-5, num_bad=num_bad)
    assert found.cause == "divergence" and order_of(found) == []


def test_advice_that_no_replay_has_tried_is_not_given():
    assert diverged(divides=1e-5).remedies == []
