"""A guard that is on and judges nothing says so once; healthy programs hear nothing."""

import logging

import pytest
import torch
from assembled import Assembled
from torch import nn

from overflow_fast import OverflowGuard

CHANGED = "changed 3 times"
OTHERS = "called 8 times"
WATCH = ["tripwire", ("activations", "weights", "gradients", "loss")]


def pair(seed=0, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def train(guard, model, optimizer, steps=12, micro=1, runs=True):
    for _ in range(steps):
        for _ in range(micro):
            compute = lambda: model(torch.randn(4, 4)).pow(2).mean()  # noqa: E731
            (guard.run(compute) if runs else compute()).backward()
        optimizer.step()
        optimizer.zero_grad()


def forgotten(watch, **options):
    model, optimizer = pair(**options)
    return OverflowGuard(model, explain=False, watch=watch), model, optimizer


def fused(watch):
    return forgotten(watch, fused=True)


def optimizer_again(watch):
    model, optimizer = pair()
    guard = OverflowGuard(model, optimizer, explain=False, watch=watch)
    guard.kept = optimizer
    return guard, model, torch.optim.SGD(model.parameters(), lr=1e-3)


def optimizer_gone(watch):
    model, optimizer = pair()
    guard = OverflowGuard(model, optimizer, explain=False, watch=watch)
    return guard, model, torch.optim.SGD(model.parameters(), lr=1e-3)


def model_again(watch):
    model, optimizer = pair()
    guard = OverflowGuard(model, optimizer, explain=False, watch=watch)
    train(guard, model, optimizer, 2)
    guard.kept = model, optimizer
    return guard, *pair(1)


def model_gone(watch):
    return OverflowGuard(*pair(), explain=False, watch=watch), *pair(1)


@pytest.mark.parametrize("watch", WATCH, ids=["tripwire", "all"])
@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize(
    "setup",
    [forgotten, fused, optimizer_again, optimizer_gone, model_again, model_gone],
)
def test_steps_that_nobody_judges_are_said_once(setup, runs, watch, caplog):
    guard, model, optimizer = setup(watch)
    is_other = setup in (model_again, model_gone)
    train(guard, model, optimizer, 50, runs=runs)
    guard.remove()
    said = [each for each in caplog.messages if CHANGED in each or OTHERS in each]
    if is_other and not runs:  # of which the guard sees nothing at all
        assert not said
        return
    assert len(said) == 1
    assert (OTHERS if is_other else CHANGED) in said[0]
    assert "has made" in said[0]


def test_a_guard_is_on_again_in_a_second_block(tmp_path):
    model, optimizer = pair()
    log = tmp_path / "log.jsonl"
    with OverflowGuard(model, optimizer, "skip", explain=False, log=log) as guard:
        train(guard, model, optimizer, 1)
    assert not guard.enabled
    with guard:
        assert guard.enabled
        model(torch.full((1, 4), torch.nan)).sum().backward()
        optimizer.step()
    assert (guard.step, guard.num_skipped, guard.enabled) == (2, 1, False)
    assert log.read_text().count('"step"') >= 2
    assert not model._forward_hooks and "step" not in vars(optimizer)


# Healthy programs.


def accumulation(watch):
    model, optimizer = pair()
    train(OverflowGuard(model, optimizer, watch=watch), model, optimizer, 2, micro=64)


class Clamps(nn.Sequential):
    """Writes to a weight in each forward."""

    def forward(self, x):
        with torch.no_grad():
            self[0].weight.mul_(0.99)
        return super().forward(x)


def writing_forward(watch):
    model = Clamps(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guard = OverflowGuard(model, optimizer, "warn", watch=watch, explain=False)
    train(guard, model, optimizer, 2, micro=12)


def evaluations(watch):
    model, optimizer = pair()
    guard = OverflowGuard(model, optimizer, watch=watch)
    other = nn.Linear(4, 1)
    for _ in range(3):
        train(guard, model, optimizer, 1)
        for _ in range(20):
            guard.run(lambda: model(torch.randn(4, 4)))  # autograd was left on
            with torch.no_grad():
                guard.run(lambda: other(torch.randn(4, 4)))


def gan(watch):
    (net, own), (critic, its) = pair(), pair(1)
    guard = OverflowGuard({"g": net, "d": critic}, [own, its], watch=watch)
    for step in range(30):
        for _ in range(step % 5):
            made = net(torch.randn(4, 4)).detach().expand(4, 4)
            guard.run(lambda made=made: critic(made).sum())
            train(guard, critic, its, 1)
        train(guard, nn.Sequential(net), own, 1)


def apart(watch):
    (net, own), (critic, its) = pair(), pair(1)
    first = OverflowGuard(net, own, watch=watch)
    second = OverflowGuard(critic, its, watch=watch)
    for _ in range(12):
        for _ in range(3):
            net(torch.randn(4, 4))
            train(second, critic, its, 1)
        train(first, net, own, 1)


def requests(watch):
    model, _ = pair()
    OverflowGuard(model, watch=watch, explain=False)
    for _ in range(20):
        model(torch.randn(4, 4))
        with torch.inference_mode():
            model(torch.randn(4, 4))


def checks(watch):
    model, optimizer = pair()
    guard = OverflowGuard(model, watch=watch, explain=False)
    for _ in range(12):
        train(guard, model, optimizer, 1, micro=3)
        guard.check()


class Methods(Assembled):
    """Is trained by methods: its own forward is never called."""

    def loss(self):
        return self.head(self.encoder(torch.randn(4, 4))).pow(2).mean()


def methods(watch):
    model = Methods(encoder=nn.Linear(4, 8), head=nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    guard = OverflowGuard(model, optimizer, watch=watch)
    for micro in (1, 20):
        for _ in range(12):
            for _ in range(micro):
                guard.run(model.loss).backward()
            optimizer.step()
            optimizer.zero_grad()


def another_model_meanwhile(watch):
    model, optimizer = pair()
    guard = OverflowGuard(model, optimizer, watch=watch)
    train(guard, model, optimizer, 2)
    train(guard, *pair(1), 12, runs=False)
    train(guard, model, optimizer, 2)


@pytest.mark.parametrize("watch", WATCH, ids=["tripwire", "all"])
@pytest.mark.parametrize(
    "program",
    [
        *(accumulation, writing_forward, evaluations, gan, apart, requests, checks),
        *(methods, another_model_meanwhile),
    ],
)
def test_a_healthy_program_hears_nothing(program, watch, caplog):
    with caplog.at_level(logging.WARNING, "overflow_fast"):
        program(watch)
    assert CHANGED not in caplog.text and OTHERS not in caplog.text
