"""The monitor of updates: weights that stand still, and those that jump."""

import pytest
import torch
from guarding import assert_same, state_of
from torch import nn

from overflow_fast import OverflowGuard
from overflow_fast.monitors import Monitor, Notice, Updates


def make(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def train(model, optimizer, steps=3):
    for i in range(steps):
        x = torch.linspace(1, 2 + i, 12).view(2, 6).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def said_of(model, optimizer, caplog, steps=3, others=(), **asked):
    monitors = [Updates(every=1, **asked), *others]
    with OverflowGuard(model, optimizer, "skip", monitors=monitors) as guard:
        train(model, optimizer, steps)
        metrics = guard.metrics()
    lines = [r.getMessage() for r in caplog.records if "Updates: " in r.getMessage()]
    return lines, metrics


def test_a_bfloat16_weight_that_a_small_rate_cannot_move_is_named(caplog, as_kept):
    model = make(torch.bfloat16)
    nn.init.constant_(model[0].weight, 0.1)
    rates = [
        {"params": [model[0].weight], "lr": 1e-6},
        {"params": [model[0].bias, *model[2].parameters()], "lr": 0.01},
    ]
    lines, metrics = said_of(model, torch.optim.SGD(rates), caplog)
    assert len(lines) == 1
    as_kept(lines[0])
    assert metrics["still_weights"] == 1


def test_an_optimizer_that_changes_nothing_is_named(caplog, as_kept):
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    train(model, optimizer, 1)
    for state in optimizer.state.values():
        state["exp_avg_sq"].fill_(float("inf"))
    lines, _ = said_of(model, optimizer, caplog)
    assert len(lines) == 1
    as_kept(lines[0])


def test_an_update_that_is_larger_than_its_weight_is_named(caplog):
    model = make()
    groups = [
        {"params": [model[0].weight], "lr": 1e5},
        {"params": list(model[2].parameters()), "lr": 1e-3},
    ]
    lines, _ = said_of(model, torch.optim.SGD(groups), caplog, steps=2)
    assert len(lines) == 1
    assert "changed 0.weight by" in lines[0]


@pytest.mark.parametrize("kind", ["Adam", "SGD", "Adagrad"])
def test_healthy_training_says_nothing_and_stays_bit_for_bit(kind, caplog):
    states = []
    for is_watched in (False, True):
        model = make()
        nn.init.zeros_(model[2].weight)  # its first updates are all that it is
        optimizer = getattr(torch.optim, kind)(model.parameters(), 1e-2)
        if is_watched:
            lines, metrics = said_of(model, optimizer, caplog, steps=20)
            assert lines == []
            assert 0 < metrics["update_ratio"] <= 2
        else:
            train(model, optimizer, 20)
        states.append(state_of(model, optimizer))
    assert_same(*states)


class Skips(Monitor):
    may_skip = True

    def look(self, step):
        return [Notice("as asked", "skip")]


def test_a_step_that_was_skipped_is_not_compared(caplog):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    lines, metrics = said_of(model, optimizer, caplog, others=[Skips()])
    assert lines == []
    assert "still_weights" not in metrics


def test_a_rate_of_0_is_not_warned_of(caplog):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    assert said_of(model, optimizer, caplog)[0] == []


def test_elements_without_a_gradient_do_not_count_as_still(caplog):
    model = nn.Embedding(100, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with OverflowGuard(model, optimizer, monitors=[Updates(every=1)]) as guard:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.tensor([1])).sum().backward()
            optimizer.step()
        assert guard.metrics()["still_weights"] == 0


def test_only_one_step_in_some_is_compared():
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitors = [Updates(every=10)]
    with OverflowGuard(model, optimizer, monitors=monitors) as guard:
        train(model, optimizer, 1)
        first = guard.metrics()["update_ratio"]
        train(model, optimizer, 9)
        assert guard.metrics()["update_ratio"] == first
        train(model, optimizer, 1)
        assert guard.metrics()["update_ratio"] != first
