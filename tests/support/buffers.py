"""Models whose forwards write to their buffers."""

import torch
from guarding import NAN, assert_same
from torch import nn

from overflow_fast import OverflowGuard

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
BAD = X.clone()
BAD[0, 0] = NAN
LARGE = 20_000  # 80 kB: copied only once it has been seen to change


def step(model, optimizer, x=X):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def assert_undone(model, optimizer, guard):
    """A bad step is skipped, and leaves nothing behind."""
    before = everything(model)
    step(model, optimizer, BAD)
    assert guard.last_step_skipped
    assert_same(everything(model), before)


def norm_net():
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def watched(model, policy="skip", **arguments):
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    return optimizer, OverflowGuard(model, optimizer, policy, **arguments)


def everything(model):
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


class Stateful(nn.Module):
    """Keeps something of what it sees, by `write(self, x)`."""

    def __init__(self, write, **buffers):
        super().__init__()
        self.linear = nn.Linear(6, 1)
        self.write = write
        for name, value in buffers.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value)

    def forward(self, x):
        with torch.no_grad():
            self.write(self, x)
        return self.linear(x)
