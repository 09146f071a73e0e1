"""A device is suspect where a module gives other values than on the CPU.

The CPU plays both parts: a device that is off is a module that knows its own weights.
"""

import pytest
import torch
from guarding import assert_same, state_of
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.explainer import second_device
from overflow_fast.explainer.second_device import TracedModule, compare_devices

FAULTS = []  # of the machine: what a module holds is put back for a replay


class Layer(nn.Module):
    """Is off by a factor with its first weights, as on a device that is faulty."""

    def __init__(self, factor=1.0, dtype=torch.float32, number=0.0):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
        self.inner.to(dtype)
        self.dtype_code, self.factor, self.number = 0, factor, number
        self.first = self.inner[0].weight.data_ptr()

    def forward(self, x):
        is_own = self.inner[0].weight.data_ptr() == self.first
        fault = FAULTS.pop() if FAULTS else 0.0
        y = self.inner(x) * (self.factor if is_own else 1.0) + fault
        return y + self.number * torch.rand(()) if self.number else y


def opinion(layer, x):
    call = TracedModule.begun(layer, "h.0", (x,), {})
    return compare_devices(call, layer(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_not_suspected(dtype, as_kept):
    layer, x = Layer(dtype=dtype), torch.randn(4, 8, dtype=dtype)
    before = state_of(layer, torch.optim.SGD(layer.parameters()))
    states = torch.get_rng_state()
    found = opinion(layer, x)
    assert not found.is_suspect
    as_kept(found)
    assert_same(before, state_of(layer, torch.optim.SGD(layer.parameters())))
    assert torch.equal(states, torch.get_rng_state())


@pytest.mark.parametrize("factor", [1.01, float("nan"), float("inf")])
def test_a_device_that_is_off_is_suspected(factor):
    found = opinion(Layer(factor), torch.randn(4, 8))
    assert found.is_suspect
    assert "cpu of host" in str(found) and str(found).endswith("is suspect")


def test_what_cannot_be_known_is_not_said():
    x = torch.randn(4, 8)
    assert opinion(Layer(number=1.0), x) is None  # random numbers
    dropping = Layer()
    dropping.inner.append(nn.Dropout(0.5))
    assert opinion(dropping, x) is None
    call = TracedModule.begun(dropping.eval(), "h.0", (x,), {})
    output = dropping(x)
    assert compare_devices(call, output) is not None
    x.add_(1)
    assert compare_devices(call, output) is None  # written to since


@pytest.mark.parametrize("factor, says", [(1.0, "the same now"), (1.5, "suspect")])
def test_a_transient_fault_is_judged_by_the_cpu(factor, says, monkeypatch):
    monkeypatch.setattr(second_device, "is_elsewhere", lambda models: True)
    model = nn.Sequential(nn.Linear(8, 8), Layer(factor), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = OverflowGuard(model, optimizer, explain=True)
    FAULTS.append(float("nan"))
    with pytest.raises(NonFiniteError) as error:
        guard.run(lambda: model(torch.randn(4, 8)).sum()).backward()
        optimizer.step()
    found = error.value.report.explanation
    assert (found.cause, found.module) == ("not reproducible", "1")
    assert found.evidence[-1].endswith(says), found
