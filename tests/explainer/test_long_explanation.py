"""An explanation that takes long says so, once."""

import pytest
import torch
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard, explain
from overflow_fast.explainer import replayer


def lines_of(caplog):
    return [e.getMessage() for e in caplog.records if "run again to find" in e.message]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def explained(model, **options):
    return explain(model, torch.zeros(2, 4), lambda x: model(x).sqrt().sum(), **options)


def test_a_quick_one_says_nothing(model, caplog):
    assert explained(model).replays
    assert lines_of(caplog) == []


def test_a_long_one_says_so_once(model, caplog, monkeypatch):
    monkeypatch.setattr(replayer, "LONG_SECONDS", 0.0)
    assert explained(model, budget=7).replays > 1
    (line,) = lines_of(caplog)
    assert "`budget=`" in line


def test_a_guards_says_so_for_each_bad_step(model, caplog, monkeypatch):
    monkeypatch.setattr(replayer, "LONG_SECONDS", 0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = OverflowGuard(model, optimizer, "raise")
    for number in (1, 2):
        with pytest.raises(NonFiniteError):
            guard.run(lambda: (model(torch.ones(2, 4)) * torch.nan).sum()).backward()
            optimizer.step()
        optimizer.zero_grad()
        assert len(lines_of(caplog)) == number
