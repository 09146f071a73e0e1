"""Wrappers and optimizers of engines that the guard has never heard of."""

import pytest
import torch
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard


class Wrapper(nn.Module):
    """An engine's wrapper of a model: it passes calls and state on."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)

    def state_dict(self, *args, **kwargs):
        return self.module.state_dict(*args, **kwargs)


def run(model, optimizer, num_steps=3, bad=2):
    """Trains; the last batch holds a nan. Returns the report's text, or None."""
    try:
        for step in range(num_steps):
            x = torch.ones(2, 4)
            x[0, 0] = float("nan") if step == bad else 1.0
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except NonFiniteError as error:
        return error.report
    return None


# A wrapper's attributes, whatever they are called.

NAMES = ["buffers", "parameters", "modules", "children", "named_modules"]
NAMES += ["named_parameters", "named_buffers", "named_children"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", ["raise", "skip", "warn"])
def test_an_attribute_may_have_the_name_of_a_method(name, policy, caplog):
    class Odd(nn.Sequential):
        pass

    inner = Odd(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(inner.parameters(), 0.1)
    model = Wrapper(inner)
    setattr(model, name, [])
    guard = OverflowGuard(model, optimizer, policy)
    report = run(model, optimizer) or guard.last_report
    assert report.step == 2
    assert report.verdict.first.fqn == "0"
    assert "failed" not in str(report)
    assert not [gap for gap in guard.coverage().gaps() if "failed" in gap]
    assert "failed with the error" not in caplog.text


@pytest.mark.parametrize("depth", [1, 2])
def test_names_are_those_of_the_model_within(depth):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.module = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x):
            return self.module(self.up(x) * torch.tensor(float("nan")))

    inner = Net()
    model = inner
    for _ in range(depth):
        model = Wrapper(model)
    optimizer = torch.optim.SGD(inner.parameters(), 0.1)
    OverflowGuard([model], optimizer, include=["up", "module"])
    with pytest.raises(NonFiniteError) as caught:
        model(torch.ones(2, 4))
        optimizer.step()
    assert caught.value.report.verdict.first.fqn == "module"


def test_a_users_model_with_one_layer_called_module_keeps_its_names():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(4, 1)

        def forward(self, x):
            return self.module(x)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    OverflowGuard(model, optimizer, include=["module"])
    assert run(model, optimizer).verdict.first.fqn == "module"
