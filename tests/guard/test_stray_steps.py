"""Steps that bypass the hook on `step`: compiled code, methods, inner optimizers."""

import pytest
import torch
from guarding import assert_same
from skipping import BAD, FirstDevice, X, snapshot
from torch import nn

from overflow_fast import OverflowGuard


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after", "as step", "in a function"])
def test_compiled_steps(when):
    torch._dynamo.reset()
    model = nn.Linear(6, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step():
        optimizer.step()

    def compiled(function):
        return torch.compile(function, backend="eager")

    if when == "before":
        step = compiled(optimizer.step)
    guard = OverflowGuard(model, optimizer, "skip")
    if when == "after":
        step = compiled(optimizer.step)
    elif when == "as step":
        optimizer.step = compiled(optimizer.step)
    elif when == "in a function":
        step = compiled(step)
    for i, x in enumerate((X, X, BAD, X)):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        model(x).sum().backward()
        gradients = [p.grad for p in model.parameters()]
        step()
        assert guard.last_step_skipped == (i == 2)
        assert before.equal(model.weight) == (i == 2)
        assert [p.grad for p in model.parameters()] == gradients
    assert guard.step == 4
    guard.remove()


@pytest.mark.parametrize("kind", [torch.optim.SGD, FirstDevice])
@pytest.mark.parametrize("has_closure", [False, True])
def test_a_method_that_was_taken_before(kind, has_closure, as_kept):
    if has_closure and kind is FirstDevice:
        pytest.skip("it ignores closures")
    model = nn.Linear(6, 1)
    optimizer = kind(model.parameters())
    step = optimizer.step

    def compute(x):
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss

    def take(x):
        if has_closure:
            return step(lambda: compute(x))
        compute(x)
        return step()

    with OverflowGuard(model, optimizer, "skip") as guard:
        take(X)
        before = model.weight.detach().clone()
        if kind is FirstDevice:
            as_kept.error(RuntimeError, take, BAD)
        else:
            take(BAD)
        assert before.equal(model.weight)
        assert model.weight.grad is not None
        assert (guard.step, guard.num_skipped) == (2, 1)
        take(X)
        assert not before.equal(model.weight)


def test_an_inner_optimizer_that_is_stepped_by_itself():
    """As by `second_step` of SAM."""

    class Sam(FirstDevice):
        def __init__(self, parameters):
            super().__init__(parameters)
            self.base = torch.optim.SGD(self.param_groups, lr=0.1)

        def step(self, closure=None):
            raise NotImplementedError

        def second_step(self):
            self.base.step()

    model = nn.Linear(6, 1)
    optimizer = Sam(model.parameters())
    with OverflowGuard(model, optimizer, "skip") as guard:
        for x in (X, BAD, X):
            before = model.weight.detach().clone()
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.second_step()
            assert before.equal(model.weight) == (x is BAD)
        assert (guard.step, guard.num_skipped) == (3, 1)


def test_a_guard_that_is_removed_within_such_a_step_leaves_no_hook():
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: guard.remove())
    taken = optimizer.step
    guard = OverflowGuard(model, optimizer, "skip")
    before = model.weight.detach().clone()
    model(BAD).sum().backward()
    taken()
    assert before.equal(model.weight) and model.weight.grad is not None
    assert not optimizer._optimizer_step_pre_hooks
    assert len(optimizer._optimizer_step_post_hooks) == 1  # the program's


def test_lbfgs_by_a_method_that_was_taken_before(as_kept):
    model = nn.Linear(6, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=4)
    taken, calls = optimizer.step, []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = (model(BAD if len(calls) > 2 else X) ** 2).sum()
        loss.backward()
        return loss

    before = snapshot(model, optimizer)
    with OverflowGuard(model, optimizer, "skip"):
        as_kept.error(RuntimeError, taken, closure)
    assert_same(snapshot(model, optimizer), before)
