"""A layer whose bits differ is named, and nothing else of the step changes."""

import contextlib
import logging

import pytest
import torch
from assembled import Assembled
from torch import nn

from overflow_fast import OverflowGuard
from overflow_fast.guard.monitors.layer_audit import LayerAuditor
from overflow_fast.guard.monitors.monitor import Guarded


class Net(Assembled):
    def forward(self, ids):
        return self.head(self.norm(self.body(self.embed(ids))))


def make(every=2):
    torch.manual_seed(0)
    model = Net(
        embed=nn.Embedding(5, 4),
        body=nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.5)),
        norm=nn.BatchNorm1d(4),
        head=nn.Linear(4, 1),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = OverflowGuard(model, optimizer)
    guarded = Guarded(guard._parts.watches, None, list, contextlib.nullcontext)
    return model, guard, LayerAuditor(guarded, every)


def forward(model, audit, step):
    audit.begin_step(step)
    output = model(torch.arange(4))
    audit.stop()
    return output


def test_layers_take_turns_and_agree(caplog):
    model, guard, audit = make()
    names = []
    with guard, caplog.at_level(logging.WARNING, "overflow_fast"):
        for step in range(10):
            audit.begin_step(step)
            names += [
                n
                for n, m in model.named_modules()
                if m._forward_hooks_with_kwargs
                and any(each.id in m._forward_hooks for each in audit._handles)
            ]
            model(torch.arange(4))
            audit.stop()
    assert names == ["embed", "body.0", "body.1", "head", "embed"]
    assert (audit.num_audited, audit.num_different) == (5, 0)
    assert caplog.messages == []


@pytest.mark.parametrize("is_steady", [True, False])
def test_other_bits_are_told(is_steady, caplog, monkeypatch, as_kept):
    model, guard, audit = make()
    calls = []
    original = nn.functional.linear

    def flaky(x, weight, bias=None):
        output = original(x, weight, bias)
        calls.append(None)
        if weight is model.head.weight and (len(calls) == 2 or not is_steady):
            output.view(torch.int32)[2] ^= len(calls)
        return output

    audit._next = 3  # head
    with guard, caplog.at_level(logging.WARNING, "overflow_fast"), torch.no_grad():
        model.eval()
        monkeypatch.setattr(nn.functional, "linear", flaky)
        forward(model, audit, 0)
        forward(model, audit, 1)
    (message,) = caplog.messages
    assert audit.num_different == 1
    as_kept(message)


def test_the_step_is_the_same_bit_for_bit():
    results = []
    for every in (1, 1000):
        model, guard, audit = make(every)
        torch.manual_seed(1)
        with guard:
            for step in range(1, 5):
                loss = forward(model, audit, step).sum()
                loss.backward()
        results.append([p.grad for p in model.parameters()] + [model.norm.running_var])
    assert all(map(torch.equal, *results))


def test_a_hook_of_the_users_that_changes_an_output_is_no_corruption(caplog):
    model, guard, audit = make()
    model.embed.register_forward_hook(lambda module, args, output: output * 2)
    with guard, caplog.at_level(logging.WARNING, "overflow_fast"):
        forward(model, audit, 0)
    assert (audit.num_audited, caplog.messages) == (1, [])


def test_a_layer_in_a_transform_is_not_computed_again():
    model, guard, audit = make()
    with guard:
        audit.begin_step(0)
        torch.func.vmap(model.eval())(torch.arange(4)[:, None])
        audit.stop()
    assert audit.num_audited == 0
