"""Finite gradients that make a state non-finite on one of several ranks."""

import pytest
import torch
import torch.distributed as dist
from guarding import assert_same, state_of
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overflow_fast import NonFiniteError, OverflowGuard

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]
LARGE = 1e22  # its square is beyond float32


def _make():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def _step(net, optimizer, scale=1.0):
    (net(torch.ones(3, 4)) * scale).sum().backward()
    try:
        optimizer.step()
    finally:
        optimizer.zero_grad()


def _large_on_one():
    return LARGE if dist.get_rank() == 1 else 1.0


def _skips(policy):
    """Leaves the step out on both ranks, and goes on."""
    asked = []

    def asks(report):
        asked.append(report.step)
        return "skip"

    model, optimizer = _make()
    policy = asks if policy == "callable" else policy
    guard = OverflowGuard(model, optimizer, policy, process_group=dist.group.WORLD)
    _step(model, optimizer)
    before = state_of(model, optimizer)
    _step(model, optimizer, _large_on_one())
    assert_same(state_of(model, optimizer), before)
    report = guard.last_report
    assert (report.step, report.action, guard.num_skipped) == (1, "skip", 1)
    assert report.where.startswith("rank 1 of 2")
    assert report.explanation.cause == "range overflow"
    assert asked == [1] * (callable(policy) and dist.get_rank() == 1)
    _step(model, optimizer)
    assert guard.last_report is report and guard.num_skipped == 1
    guard.remove()


def _raises():
    model, optimizer = _make()
    guard = OverflowGuard(model, optimizer, process_group=dist.group.WORLD)
    _step(model, optimizer)
    before = state_of(model, optimizer)
    with pytest.raises(NonFiniteError):
        _step(model, optimizer, _large_on_one())
    assert_same(state_of(model, optimizer), before)
    _step(model, optimizer)
    assert guard.metrics()["bad_steps_total"] == 1
    guard.remove()


def _in_ddp():
    model, optimizer = _make()
    net = DistributedDataParallel(model)
    guard = OverflowGuard(net, optimizer, "skip")
    for scale in (1.0, _large_on_one(), 1.0):
        _step(net, optimizer, scale)
    assert guard.num_skipped == 1 and guard.last_report.step == 1
    assert all(p.isfinite().all() for p in model.parameters())
    guard.remove()


def _loses_the_step_of_one():
    """The guard itself fails on one rank behind the step: the other does not wait."""
    from overflow_fast.guard import pipeline

    def fail(*arguments):
        raise ValueError("broken")

    model, optimizer = _make()
    guard = OverflowGuard(model, optimizer, "skip", process_group=dist.group.WORLD)
    _step(model, optimizer)
    see_update = pipeline.see_update
    if dist.get_rank() == 0:
        pipeline.see_update = fail
    try:
        _step(model, optimizer, _large_on_one())
    finally:
        pipeline.see_update = see_update
    assert guard.num_skipped == 1
    guard.remove()


def _all():
    for policy in ("skip", "callable"):
        _skips(policy)
    _raises()
    _in_ddp()
    _loses_the_step_of_one()
    return True


def test_ranks_that_decide_together_judge_an_update_together():
    assert on_ranks(2, _all) == [True, True]
