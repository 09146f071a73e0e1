"""Modules keep the names that their author gave them, whatever wraps them."""

import torch
from guarding import INF, make, plant
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.nn.parallel import DataParallel

from overflow_fast import OverflowGuard, keep_in_fp32
from overflow_fast.base.modules import named_modules


def names_of(model):
    return [name for name, _ in named_modules(model)]


def test_without_wrappers_the_names_are_torchs():
    model, _ = make()
    assert list(named_modules(model)) == list(model.named_modules())


def test_wrappers_leave_no_name():
    model, _ = make()
    plain = names_of(model)
    assert names_of(torch.compile(model)) == ["", *plain]
    assert names_of(DataParallel(model)) == ["", *plain]
    assert names_of(DataParallel(torch.compile(model))) == ["", "", *plain]
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    at = plain.index("blocks.1")
    assert names_of(model) == [*plain[:at], "blocks.1", *plain[at:]]


def test_a_users_own_attribute_keeps_its_name():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)

    assert names_of(Holder()) == ["", "module"]
    assert names_of(nn.Sequential(Holder())) == ["", "0", "0.module"]


def test_a_guard_speaks_of_the_authors_names():
    inner, _ = make()
    inner.blocks[1] = checkpoint_wrapper(inner.blocks[1])
    model = DataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 8)
    with OverflowGuard(model, optimizer, "warn", exclude=["*.act"]) as guard:
        with plant(inner.blocks[1].fc2, INF):
            model(x, y=torch.zeros(4, 1))["loss"].backward()
        optimizer.step()
    verdict = guard.last_report.verdict
    assert verdict.origin.maker == "blocks.1.fc2"
    assert "blocks.1.fc2.weight" in {*verdict.dirty_gradients, *verdict.clean_gradients}
    assert keep_in_fp32(model, ["blocks.1.fc2"]).names == ["blocks.1.fc2"]
