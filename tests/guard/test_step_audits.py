"""A guard looks inside of operations, at bits and at replicas as often as asked."""

import functools
import logging

import pytest
import ranks
import torch
import torch.distributed as dist
from assembled import Assembled
from guarding import assert_same, state_of
from torch import nn

from overflow_fast import OverflowGuard
from overflow_fast.monitors import LayerAudit, MaskedOps, Replicas

INF = float("inf")


class Attention(Assembled):
    """A softmax of its own, whose overflow is divided away where a test asks."""

    def forward(self, x, large=False):
        scores = self.linear(x) + (200.0 if large else 0.0)
        odds = torch.exp(scores)
        share = odds / (1 + odds)
        mask = torch.zeros(4).masked_fill(torch.arange(4) > 2, -INF)
        share = torch.where(odds.isinf(), torch.ones_like(share), share).detach()
        return self.drop(torch.softmax(self.linear(x) * share + mask, -1))


def make(**options):
    torch.manual_seed(0)
    model = Attention(linear=nn.Linear(4, 4), drop=nn.Dropout(0.2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, OverflowGuard(model, optimizer, **options)


def loss_of(model, x, is_large):
    return model(x, is_large).square().mean()


def train(model, optimizer, guard, steps, large=()):
    torch.manual_seed(1)
    for step in range(steps):
        optimizer.zero_grad()
        compute = functools.partial(loss_of, model, torch.ones(3, 4), step in large)
        guard.run(compute).backward()
        optimizer.step()


@pytest.mark.parametrize("watch", ["tripwire", ("activations", "loss", "gradients")])
def test_overflows_inside_of_a_module_are_told_once(watch, caplog, as_kept):
    model, optimizer, guard = make(monitors=[MaskedOps(every=2)], watch=watch)
    with guard, caplog.at_level(logging.WARNING, "overflow_fast"):
        train(model, optimizer, guard, 8, large=(3, 4, 6))
        (message,) = caplog.messages
        assert guard.metrics()["hidden_failures_total"] == 1
    as_kept(message)


def test_audits_change_no_bit():
    states = []
    audits = [MaskedOps(every=1), LayerAudit(every=1), Replicas(every=1)]
    for monitors in ((), audits):
        model, optimizer, guard = make(explain=False, monitors=monitors)
        with guard:
            train(model, optimizer, guard, 4, large=(2,))
        states.append(state_of(model, optimizer))
    assert_same(*states)


def test_layers_are_audited_in_their_steps(caplog):
    model, optimizer, guard = make(monitors=[LayerAudit(every=3)])
    with guard, caplog.at_level(logging.WARNING, "overflow_fast"):
        train(model, optimizer, guard, 5)
        metrics = guard.metrics()
        assert caplog.messages == []
    assert metrics["layers_audited_total"] == 2
    assert metrics["layers_different_total"] == 0
    assert not model.linear._forward_hooks


def differing():
    torch.manual_seed(0)
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("overflow_fast").addHandler(handler)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with OverflowGuard(model, optimizer, monitors=[Replicas(every=2)]) as guard:
        for step in range(5):
            if step == 3 and dist.get_rank() == 1:
                with torch.no_grad():
                    model.module.bias += 1
            optimizer.zero_grad()
            model(torch.ones(3, 4)).mean().backward()
            optimizer.step()
        count = guard.metrics()["replicas_different_total"]
    return count, [text for text in messages if "replicas" in text]


def test_replicas_are_compared(as_kept):
    for count, messages in ranks.on_ranks(2, differing):
        assert count == 1
        (message,) = messages
        as_kept(message)


def test_replicas_that_are_not_there_are_told_once(caplog, as_kept):
    model, optimizer, guard = make(monitors=[Replicas(every=2)])
    with guard:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).mean().backward()
            optimizer.step()
    as_kept(caplog.messages)
