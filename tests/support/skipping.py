"""Optimizers of unusual kinds, and comparisons of all that a step may change."""

import copy

import torch
from guarding import NAN

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
BAD = X.clone()
BAD[0, 0] = NAN


def run(model, optimizer, x=X):
    optimizer.zero_grad()
    loss = model(x).sum()
    loss.backward()
    return optimizer.step()


def snapshot(model, optimizer):
    """All that a step may change, however an optimizer keeps it."""
    kept = {
        name: copy.deepcopy(value)
        for name, value in vars(optimizer).items()
        if isinstance(value, (int, float, torch.Tensor))
    }
    groups = [
        {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]
    state = [copy.deepcopy(value) for value in optimizer.state.values()]
    return [copy.deepcopy(model.state_dict()), kept, groups, state]


@torch.no_grad()
def descend(optimizer, factor=0.1):
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.sub_(factor * p.grad)


class FirstDevice(torch.optim.Optimizer):
    """Looks at its first parameter, as Adan does."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        assert self.param_groups[0]["params"][0].device.type == "cpu"
        descend(self)


class Wrapper:
    """A wrapper of an optimizer that is none itself, as Lookahead of timm."""

    def __init__(self, parameters):
        self.optimizer = torch.optim.SGD(parameters, lr=0.1)
        self.calls = 0

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self, closure=None):
        self.calls += 1
        return self.optimizer.step(closure)
