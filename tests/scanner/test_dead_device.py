"""A device that has died: what its scans have seen is read without asking it.

A failed assert on a GPU, or an index made of a nan, ends the CUDA context: each later
call fails, and nothing comes back from the device's memory.
"""

import gc
import weakref

import pytest
import torch
from emulation import emulated_device, emulation
from sealed import die, life, own_offset, sealed_device, watched
from torch import nn

from overflow_fast import _C, NonFiniteError, OverflowGuard
from overflow_fast.guard.collect import Collector

pytestmark = pytest.mark.sealed

DIED = "device-side assert triggered"


@pytest.fixture
def kills():
    """A function that ends the simulated device, which has CUDA's kernels."""
    sealed_device()

    def kill():
        emulated_device().state.has_died = 1
        die()

    with life(), emulation(type="sealed", own_offset=own_offset()):
        yield kill
    _C.register_scan("sealed", None)  # forgets what could not be scanned there


class Log(nn.Module):
    def forward(self, x):
        return x.log()


class Asserts(nn.Module):
    """A failed assert on the device, which the next operation here meets."""

    def __init__(self, kill):
        super().__init__()
        self.kill, self.is_on = kill, False

    def forward(self, x):
        if self.is_on:
            self.kill()
        return x * 2


class Model(nn.Module):
    def __init__(self, kill):
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.log = Log()
        self.norm = nn.BatchNorm1d(4)
        self.check = Asserts(kill)
        self.down = nn.Linear(4, 4)

    def forward(self, x):
        return self.down(self.check(self.norm(self.log(self.up(x).square() * x))))


def made(kill):
    torch.manual_seed(0)
    model = Model(kill).to("sealed")
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def step(model, optimizer, x):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(model, optimizer):
    for _ in range(3):
        step(model, optimizer, torch.ones(3, 4, device="sealed"))


WRONG = {"inf": 0.0, "nan": -1.0}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("sync", ["step", "lagged"])
def test_what_a_dead_device_has_seen_is_reported(kills, sync, kind, caplog):
    model, optimizer = made(kills)
    wrong = torch.full((3, 4), WRONG[kind], device="sealed")
    with OverflowGuard(model, optimizer, sync=sync) as guard:
        trained(model, optimizer)
        model.check.is_on = True
        with pytest.raises(torch.AcceleratorError, match=DIED) as caught:
            step(model, optimizer, wrong)
        report = guard.last_report
        assert guard.coverage().failures == 0
    first = report.verdict.first
    assert (report.step, first.fqn, first.label) == (3, "log", "output")
    assert report.explanation is None
    (note,) = caught.value.__notes__
    sign = "-" * (kind == "inf")
    assert f"Step 3: `output` of log (Log) holds {sign}{kind}." in note
    assert "the device has failed" in note
    frames = str(report)
    assert f"{kind:>17} output" in frames and "not scanned input[0]: sealed" in frames
    assert not [each for each in caplog.records if each.exc_info]


@pytest.mark.parametrize("sync", ["step", "lagged"])
def test_pinned_memory_is_not_freed_while_the_device_is_dead(kills, sync):
    model, optimizer = made(kills)
    with watched() as seen:
        guard = OverflowGuard(model, optimizer, sync=sync)
        trained(model, optimizer)
        model.check.is_on = True
        with pytest.raises(torch.AcceleratorError, match=DIED):
            step(model, optimizer, torch.ones(3, 4, device="sealed"))
        guard.remove()
        del guard, model, optimizer
        gc.collect()
    assert seen["pinned memory freed while dead"] == 0 < seen["copy to host"]


def test_nothing_is_said_of_a_dead_device_that_has_seen_nothing(kills):
    model, optimizer = made(kills)
    with OverflowGuard(model, optimizer) as guard:
        trained(model, optimizer)
        model.check.is_on = True
        with pytest.raises(torch.AcceleratorError, match=DIED) as caught:
            step(model, optimizer, torch.ones(3, 4, device="sealed"))
        assert guard.last_report is None
        assert not hasattr(caught.value, "__notes__")


def test_an_inf_of_an_earlier_step_is_not_that_of_the_last(kills):
    model, optimizer = made(kills)
    wrong = torch.zeros(3, 4, device="sealed")
    with OverflowGuard(model, optimizer, "skip", explain=False) as guard:
        trained(model, optimizer)
        step(model, optimizer, wrong)
        assert guard.num_skipped == 1
        trained(model, optimizer)
        model.check.is_on = True
        with pytest.raises(torch.AcceleratorError, match=DIED):
            step(model, optimizer, torch.ones(3, 4, device="sealed"))
        assert guard.last_report.step == 3


@pytest.mark.parametrize("waits", [False, True])
def test_a_device_that_dies_before_the_step(kills, waits, monkeypatch):
    model, optimizer = made(kills)
    guard = OverflowGuard(model, optimizer, explain=False)
    receive = Collector.receive

    def dies(self, is_lagged=False):
        kills()
        receive(self, is_lagged)

    # Where the host notices as it waits for the slots, the error is the device's.
    error = RuntimeError if waits else NonFiniteError
    with pytest.raises(error, match="log") as caught, guard:
        trained(model, optimizer)
        model(torch.zeros(3, 4, device="sealed")).sum().backward()
        if waits:
            monkeypatch.setattr(Collector, "receive", dies)
        else:
            kills()
        optimizer.step()
    assert isinstance(caught.value, NonFiniteError) != waits
    first = guard.last_report.verdict.first
    assert (guard.last_report.step, first.fqn) == (3, "log")


def test_a_step_that_a_dead_device_has_ended_is_let_go_of(kills, monkeypatch):
    model, optimizer = made(kills)
    receive = Collector.receive

    def dies(self, is_lagged=False):
        kills()
        receive(self, is_lagged)

    def bad_step():
        of_step = nn.Identity()
        held.append(weakref.ref(of_step))
        step(model, optimizer, torch.zeros(3, 4, device="sealed"))

    held = []
    with OverflowGuard(model, optimizer, explain=False):
        trained(model, optimizer)
        monkeypatch.setattr(Collector, "receive", dies)
        with pytest.raises(RuntimeError, match="log"):
            bad_step()
        gc.collect()
        assert held[0]() is None
