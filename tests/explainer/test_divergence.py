"""Runs that diverge: by how much the weights have grown, and why."""

import pytest
import torch
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.options import Explain, Schedule


def diverged(policy="raise", **guarding):
    """The explanation of a run that diverges, and its end."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    guard = OverflowGuard(
        model, optimizer, policy, explain=Explain("always"), **guarding
    )
    for _ in range(200):  # each step takes the weights 10 times as far
        x = torch.randn(8, 4)
        (model(x).squeeze(1) - x.sum(1)).pow(2).mean().backward()
        try:
            optimizer.step()
        except NonFiniteError:
            break
        optimizer.zero_grad()
    guard.remove()
    return guard.last_report.explanation


def test_weights_that_have_grown_are_named(as_kept):
    found = diverged()
    assert found.cause == "divergence"
    as_kept(found.reason)


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
        (0.999, False, r"Adam with its own .* at most 7\.27\.[^$]*code that writes"),
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
            if (beta2, step) == (0.999, 12) or (amsgrad and step == 12):
                model["w"].data.mul_(1e3)
    guard.remove()


@pytest.mark.parametrize("settings", [{}, {"betas": (0.8, 0.99), "lr": 1e-2}])
def test_an_update_by_averages_of_a_checkpoint_is_told(settings):
    """Adam's divisor was rounded to 0 in it: no learning rate is at fault."""
    model = nn.ParameterDict({"w": torch.full([8], 0.1), "v": torch.ones(1)})
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 0.1, **settings})
    x = torch.linspace(1, 2, 8)

    def loss(slope):
        return (slope * x * model["w"] + 0 * (model["v"] * model["w"]).exp()).sum()

    for _ in range(30):
        (-loss(1e-4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()
    for each in state["state"].values():
        each["exp_avg_sq"] = each["exp_avg_sq"].half()
    optimizer.load_state_dict(state)
    told = r"Divergence.* in one by .*, where AdamW with its own [^$]*in float32"
    with (
        OverflowGuard(model, optimizer) as guard,
        pytest.raises(NonFiniteError, match=told) as raised,
    ):
        for _ in range(20):
            guard.run(lambda: -loss(1e-8)).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = str(raised.value.report)
    assert "does not fit its exp_avg" in " ".join(report.split())
    assert "in sample" not in report
    assert "lower the learning rate" not in report


def test_steps_that_were_not_watched_are_not_counted():
    assert "watched steps" in diverged(schedule=Schedule(2)).reason


def test_advice_that_no_replay_has_tried_is_not_given():
    assert diverged().remedies == []
