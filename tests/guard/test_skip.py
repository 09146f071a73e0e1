"""A skipped step has not happened: weights and state of optimizers of every kind."""

import pytest
import torch
from guarding import NAN, assert_same
from skipping import BAD, FirstDevice, Wrapper, X, descend, run, snapshot
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard


class StacksNorms(FirstDevice):
    """Stacks norms, as SAM does: an empty list cannot be stacked."""

    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        torch.stack([p.grad.norm() for p in params]).norm()
        descend(self)


class CountsInTensors(torch.optim.Optimizer):
    """Counts in a tensor of its group, as timm's Lamb does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"step": torch.zeros(())})

    def step(self, closure=None):
        self.param_groups[0]["step"].add_(1)
        descend(self)


class CountsInAttributes(FirstDevice):
    """Counts in attributes and in a state that belongs to no parameter."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        self.state["global"]["k"] = self.state["global"].get("k", 0) + 1
        self.norms = torch.ones(2) * self.calls
        descend(self)


class OwnList(FirstDevice):
    """Finds its weights by a list of its own, and writes through `.data`."""

    def __init__(self, parameters):
        self.mine = list(parameters)
        super().__init__(self.mine)

    def step(self, closure=None):
        for p in self.mine:
            p.data.add_(p.grad.data, alpha=-0.1)


class Subclass(torch.optim.AdamW):
    """Calls the step that it overrides: torch runs the step's hooks twice."""

    def step(self, closure=None):
        return super().step(closure)


class Scaled(FirstDevice):
    """Takes another positional argument than a closure."""

    def step(self, factor=1.0):
        descend(self, factor)
        return factor


class Inner(torch.optim.Optimizer):
    """Has another optimizer among its attributes, and counts around it."""

    def __init__(self, parameters):
        self.inner = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        super().__init__(self.inner.param_groups, {})
        self.calls = 0

    def step(self, closure=None):
        self.calls += 1
        return self.inner.step(closure)


CUSTOM = [
    *(FirstDevice, StacksNorms, CountsInTensors, CountsInAttributes, OwnList),
    *(Subclass, Scaled, Inner, Wrapper),
]


@pytest.mark.parametrize("kind", CUSTOM, ids=lambda kind: kind.__name__)
def test_optimizers_of_every_kind(kind):
    model = nn.Linear(6, 1)
    optimizer = kind(model.parameters())
    with OverflowGuard(model, optimizer, "skip") as guard:
        run(model, optimizer)
        before = snapshot(model, optimizer)
        run(model, optimizer, BAD)
        assert guard.last_step_skipped
        assert_same(snapshot(model, optimizer), before)
        run(model, optimizer)
        assert not guard.last_step_skipped
        assert (guard.step, guard.num_skipped) == (3, 1)
    assert not torch.equal(before[0]["weight"], model.weight)


def implementations():
    for name in sorted(torch.optim.__all__):
        kind = getattr(torch.optim, name, None)
        if not isinstance(kind, type) or name in ("Optimizer", "LBFGS", "SparseAdam"):
            continue
        names = kind.__init__.__code__.co_varnames
        yield name, {}
        for flag in ("foreach", "fused", "capturable", "differentiable", "maximize"):
            if flag in names:
                yield name, {flag: True}


@pytest.mark.parametrize(("name", "flags"), list(implementations()), ids=str)
def test_every_optimizer_of_torch_in_each_implementation(name, flags):
    model = nn.Linear(6, 4, bias=name != "Muon")
    try:
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2, **flags)
        run(model, optimizer)
    except (RuntimeError, AssertionError) as error:
        pytest.skip(str(error))  # torch's own: not on the CPU
    with OverflowGuard(model, optimizer, "skip") as guard:
        run(model, optimizer)
        before = snapshot(model, optimizer)
        run(model, optimizer, BAD)
        assert guard.last_step_skipped
        assert_same(snapshot(model, optimizer), before)


def test_a_step_returns_what_it_returns():
    model = nn.Linear(6, 1)
    optimizer = Scaled(model.parameters())
    with OverflowGuard(model, optimizer, "skip"):
        model(X).sum().backward()
        assert optimizer.step(0.5) == 0.5
        assert optimizer.step(factor=0.25) == 0.25


def test_state_that_a_first_step_has_made_is_gone():
    model = nn.Linear(6, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    before = snapshot(model, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = (model(BAD) ** 2).mean()
        loss.backward()
        return loss

    with OverflowGuard(model, optimizer, "skip"):
        optimizer.step(closure)
    assert not optimizer.state
    assert_same(snapshot(model, optimizer), before)


@pytest.mark.parametrize("policy", ["skip", lambda report: "skip"])
@pytest.mark.explains
def test_a_weight_that_is_bad_already_raises(policy, as_kept):
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, policy) as guard:
        run(model, optimizer)
        with torch.no_grad():
            model.weight[0, 2] = NAN
        as_kept.error(NonFiniteError, run, model, optimizer)
        assert guard.num_skipped == 0


def test_a_bad_weight_of_one_call_is_skipped():
    """As in meta-learning: what functional_call is given is nobody's state."""
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "skip") as guard:
        fast = {"weight": model.weight * NAN, "bias": model.bias}
        torch.func.functional_call(model, fast, (X,)).sum().backward()
        optimizer.step()
        assert guard.num_skipped == 1
