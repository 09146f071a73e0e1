"""Gradients of leaves that are no parameters are the step's own behind a replay."""

import contextlib
import functools
import types

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.monitors import MaskedOps


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x):
        return self.linear(x).mean() + x.detach().mean().log()


def of_variable(model, leaf):
    return lambda x: model(x * leaf)


def of_default(model, leaf):
    return lambda x, leaf=leaf: model(x * leaf)


def of_partial(model, leaf):
    return functools.partial(lambda leaf, x: model(x * leaf), leaf)


def of_object(model, leaf):
    space = types.SimpleNamespace(held=[{"leaf": leaf}])
    return lambda x: model(x * space.held[0]["leaf"])


def of_attribute(model, leaf):
    model.leaf = leaf
    return lambda x: model(x * model.leaf)


def out_of_sight(model, leaf):
    """A generator's variable: no walk through objects comes to it."""

    def endless():
        while True:
            yield leaf * 1

    made = [next(endless()).grad_fn.next_functions[0][0]]
    return lambda x: model(x * made[0].variable)


def in_checkpoint(model, leaf):
    """Its backward calls one of its own, for a graph that is made there."""

    def part(x):
        return x * leaf

    return lambda x: model(checkpoint(part, x.requires_grad_(), use_reentrant=True))


def in_backward_of_its_own(model, leaf):
    def function(x):
        (x * leaf).sum().backward()
        return model(x * leaf)

    return function


WAYS = [
    of_variable,
    of_default,
    of_partial,
    of_object,
    of_attribute,
    out_of_sight,
    in_checkpoint,
    in_backward_of_its_own,
]


def train(way, leaf, policy, is_bad, **options):
    """Trains two steps; yields what the gradients are in front of and behind step()."""
    torch.manual_seed(0)
    model = Scaled()
    function = way(model, leaf)
    optimizer = torch.optim.SGD([*model.parameters(), leaf], lr=0.1)
    with OverflowGuard(model, optimizer, policy, **options) as guard:
        for step in range(2):
            x = torch.full((2, 3), -1.0 if is_bad and step else 1.0)
            guard.run(lambda x=x: function(x)).backward()
            before = leaf.grad, leaf.grad.to_dense().clone()
            with contextlib.suppress(NonFiniteError):
                optimizer.step()
            yield before, leaf.grad
            optimizer.zero_grad()
        assert guard.coverage().failures == 0


def assert_as_before(steps):
    for (gradient, bits), now in steps:
        assert now is gradient
        assert torch.equal(now.to_dense(), bits)


@pytest.mark.parametrize("way", WAYS)
def test_clean_steps(way):
    leaf = torch.ones(3, requires_grad=True)
    assert_as_before(train(way, leaf, "skip", False, monitors=[MaskedOps(1)]))


@pytest.mark.parametrize("policy", ["warn", "skip", "raise"])
@pytest.mark.parametrize("way", [of_variable, out_of_sight])
def test_bad_steps(way, policy):
    assert_as_before(train(way, torch.ones(3, requires_grad=True), policy, True))


def test_sparse_gradients():
    table = torch.ones(1, 3, requires_grad=True)
    row = functools.partial(nn.functional.embedding, torch.tensor([0]), sparse=True)
    way = lambda model, leaf: lambda x: model(x * row(leaf))  # noqa: E731
    assert_as_before(train(way, table, "warn", False, monitors=[MaskedOps(1)]))


def test_a_leaf_without_a_gradient_has_none():
    leaf = torch.ones(3, requires_grad=True)
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, monitors=[MaskedOps(1)]) as guard:
        loss = guard.run(lambda: model(leaf.expand(2, 3)))
        loss.backward(inputs=list(model.parameters()))
        optimizer.step()
    assert leaf.grad is None


def test_hooks_behind_the_gradient_are_not_called():
    leaf, calls = torch.ones(3, requires_grad=True), []
    leaf.register_post_accumulate_grad_hook(calls.append)
    assert_as_before(train(of_variable, leaf, "skip", False, monitors=[MaskedOps(1)]))
    assert len(calls) == 2


def test_a_self_test():
    leaf = torch.ones(3, requires_grad=True)
    model = Scaled()
    optimizer = torch.optim.SGD([*model.parameters(), leaf], lr=0.1)
    with OverflowGuard(model, optimizer) as guard:
        (leaf * 2).sum().backward()
        gradient = leaf.grad
        guard.self_test(torch.ones(2, 3), loss=lambda x: model(x * leaf))
    assert leaf.grad is gradient and gradient.tolist() == [2, 2, 2]
