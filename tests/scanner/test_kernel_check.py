"""Kernels are compared with the CPU's at first use; where they fail, torch scans."""

import logging

import pytest
import torch
from torch import nn

from overflow_fast import _C, NonFiniteError, OverflowGuard
from overflow_fast.scanner.ops import scan_with

NAN = float("nan")
BROKEN = {
    "no kernel image": {"fails_scans": 1},
    "wrong": {"wrong_scans": 1},
}
WHY = {"no kernel image": "launch failed", "wrong": "results differ"}


def found(value):
    """What a scan by the registered kernels says of a tensor with such a value."""
    (stat,) = scan_with([torch.tensor([1.0, value])], _C.ScanBackend.DEVICE)
    return stat.has_nan, stat.has_inf, stat.not_scanned


def steps(guard, model, optimizer, batches):
    """Which of the steps are skipped."""
    skipped = []
    for batch in batches:
        before = guard.num_skipped
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(guard.num_skipped > before)
    return skipped


def guarded(policy="skip"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = OverflowGuard(model, optimizer, policy, explain=False, _defer=True)
    return guard, model, optimizer


def batches():
    x = torch.randn(4, 8)
    bad = x.clone()
    bad[1, 2] = NAN
    return [x, x, bad, x]


def test_kernels_that_are_right_are_used(emulated):
    emulated.register_fresh()
    assert found(NAN) == (True, False, None) and not _C.unused_kernels()
    num_scans = emulated.state.num_scans
    found(NAN)
    assert emulated.state.num_scans == num_scans + 1  # the check is made once


@pytest.mark.parametrize("how", BROKEN)
def test_kernels_that_fail_their_check_are_left_to_torch(emulated, how, caplog):
    emulated.register_fresh(**BROKEN[how])
    num_scans = None
    with caplog.at_level(logging.WARNING, "overflow_fast"):
        guard, model, optimizer = guarded()
        with guard:
            assert steps(guard, model, optimizer, batches()) == [0, 0, 1, 0]
            num_scans = emulated.state.num_scans
            assert found(torch.inf) == (False, True, None)
            coverage = guard.coverage()
    assert emulated.state.num_scans == num_scans
    assert not coverage.not_scanned and coverage.tensors_scanned
    assert WHY[how] in coverage.unused_kernels["cpu"]
    assert coverage.unused_kernels["cpu"] in str(coverage)
    said = [r.getMessage() for r in caplog.records if "kernels of" in r.getMessage()]
    assert len(said) == 1 and WHY[how] in said[0]


def test_a_launch_that_fails_later_is_made_up_for(emulated):
    guard, model, optimizer = guarded()
    with guard:
        data = batches()
        assert steps(guard, model, optimizer, data[:2]) == [False, False]
        emulated.state.fails_scans = 1
        assert steps(guard, model, optimizer, data[2:]) == [True, False]
        assert found(NAN) == (True, False, None)
        assert not guard.coverage().not_scanned
        assert "launch failed" in _C.unused_kernels()["cpu"]


def test_while_a_graph_is_captured_only_kernels_scan(emulated):
    emulated.register_fresh(fails_scans=1)
    guard, model, _ = guarded()
    with guard:
        model(batches()[0])
        with emulated.capture():
            model(batches()[0])
        assert any("captured" in why for why in guard.coverage().not_scanned)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_gradients_whose_stats_do_not_arrive_are_scanned_again(emulated, policy):
    guard, model, optimizer = guarded(policy)
    hook = model[2].weight.register_hook(lambda gradient: gradient * NAN)
    with guard:
        model(batches()[0]).sum().backward()
        emulated.state.fails_streams = 1  # from the verdict on
        try:
            optimizer.step()
            assert policy == "skip" and guard.num_skipped == 1
        except NonFiniteError as error:
            assert policy == "raise" and "2.weight" in str(error)
        emulated.state.fails_streams = 0
        hook.remove()
        assert all(bool(p.isfinite().all()) for p in model.parameters())
