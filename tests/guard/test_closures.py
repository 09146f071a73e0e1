"""Steps with closures: judged inside of them, and undone if they are skipped."""

import pytest
import torch
from guarding import NAN, assert_same
from skipping import BAD, FirstDevice, Wrapper, X, descend, snapshot
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard


class TwoPasses(torch.optim.Optimizer):
    """Moves the weights, and has the closure compute gradients there: SAM."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.calls = 0

    def step(self, closure):
        self.calls += 1
        old = [p.detach().clone() for p in self.param_groups[0]["params"]]
        descend(self, -0.5)
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for p, value in zip(self.param_groups[0]["params"], old, strict=True):
                p.copy_(value)
        descend(self)
        return loss


@pytest.mark.parametrize("policy", ["skip", "raise"])
@pytest.mark.parametrize(
    ("kind", "bad_call"),
    [(TwoPasses, 1), (torch.optim.LBFGS, 1), (torch.optim.LBFGS, 2)],
)
def test_closures_leave_weights_and_state_as_they_were(kind, bad_call, policy):
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    optimizer = kind(model.parameters())
    for group in optimizer.param_groups:
        group.update({"lr": 0.01, "max_iter": 4} if "lr" in group else {})
    calls_until_bad = [-1]

    def closure():
        calls_until_bad[0] -= 1
        optimizer.zero_grad()
        loss = (model(BAD if calls_until_bad[0] == 0 else X) ** 2).mean()
        loss.backward()
        return loss

    with OverflowGuard(model, optimizer, policy) as guard:
        optimizer.step(closure)
        before = snapshot(model, optimizer)
        calls_until_bad[0] = bad_call
        if policy == "raise":
            with pytest.raises(NonFiniteError):
                optimizer.step(closure)
        else:
            assert optimizer.step(closure).isnan()
            assert (guard.num_skipped, guard.consecutive_skips) == (1, 1)
        assert calls_until_bad[0] == 0  # nothing more is called
        assert_same(snapshot(model, optimizer), before)
        assert guard.step == 2
        optimizer.zero_grad()
        optimizer.step(closure)
        assert guard.step == 3


def test_a_closure_in_a_wrapper_that_is_no_optimizer():
    class Explorer(Wrapper):
        def step(self, closure):
            self.calls += 1
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1)
            return self.optimizer.step(closure)

    model = nn.Linear(6, 1)
    optimizer = Explorer(model.parameters())
    before = snapshot(model, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = model(BAD).sum()
        loss.backward()
        return loss

    with OverflowGuard(model, optimizer, "skip") as guard:
        assert optimizer.step(closure).isnan()
        assert guard.num_skipped == 1
    assert_same(snapshot(model, optimizer), before)


def test_weights_that_are_bad_in_the_middle_of_a_step_are_put_back():
    class Explorer(TwoPasses):
        def step(self, closure):
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(NAN)
            return closure()

    model = nn.Linear(6, 1)
    optimizer = Explorer(model.parameters())
    before = snapshot(model, optimizer)
    with OverflowGuard(model, optimizer, "skip") as guard:
        optimizer.step(lambda: model(X).sum())
        assert guard.num_skipped == 1
    assert_same(snapshot(model, optimizer), before)


def test_what_step_hooks_did_before_a_closure_is_put_back():
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def shrink(*_):
        with torch.no_grad():
            model.weight.mul_(0.5)

    optimizer.register_step_pre_hook(shrink)

    def closure():
        loss = model(BAD).sum()
        loss.backward()
        return loss

    before = model.weight.detach().clone()
    with OverflowGuard(model, optimizer, "skip"):
        assert optimizer.step(closure=closure).isnan()
    assert before.equal(model.weight)


class Calls(FirstDevice):
    """Does something of its own with what `step` is given."""

    def __init__(self, parameters, call):
        super().__init__(parameters)
        self.call = call

    def step(self, given=None):
        self.result = self.call(given)
        descend(self)


@pytest.mark.parametrize("policy", ["warn", "skip"])
@pytest.mark.parametrize(
    ("call", "given"),
    [
        (lambda f: f(3), lambda t: t + 1),
        (lambda f: len(list(f.parameters())), nn.Linear(2, 2)),
        (lambda f: f(backward=True), lambda backward: backward),
    ],
)
def test_what_is_callable_and_no_closure_is_handed_on(call, given, policy):
    model = nn.Linear(6, 1)
    optimizer = Calls(model.parameters(), call)
    expected = call(given)
    with OverflowGuard(model, optimizer, policy):
        model(X).sum().backward()
        optimizer.step(given)
    assert optimizer.result == expected


def test_a_closure_may_take_arguments_and_have_attributes():
    class Asks(FirstDevice):
        def step(self, closure):
            assert closure.name == "mine"
            return closure(backward=True)

    model = nn.Linear(6, 1)
    optimizer = Asks(model.parameters())

    def closure(backward):
        loss = model(BAD).sum()
        if backward:
            loss.backward()
        return loss

    closure.name = "mine"
    with OverflowGuard(model, optimizer, "skip") as guard:
        assert optimizer.step(closure).isnan()
        assert guard.num_skipped == 1


def test_a_step_that_was_wrapped_before_is_undone_too():
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = optimizer.step

    def decayed(closure=None):
        with torch.no_grad():
            model.weight.mul_(0.9)
        return inner(closure)

    def closure():
        loss = model(BAD).sum()
        loss.backward()
        return loss

    optimizer.step = decayed
    before = model.weight.detach().clone()
    with OverflowGuard(model, optimizer, "raise"):
        with pytest.raises(NonFiniteError):
            optimizer.step(closure)
    assert before.equal(model.weight)


def test_closures_with_what_cannot_be_copied():
    model = nn.LazyLinear(1)

    def closure(x=X):
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss

    class Plain(FirstDevice):
        def step(self, closure):
            loss = closure()
            descend(self)
            return loss

    optimizer = Plain(model.parameters())
    optimizer.wide = torch.zeros(1).expand(4)
    with OverflowGuard(model, optimizer, "skip") as guard:
        optimizer.step(closure)
        before = model.weight.detach().clone()
        optimizer.step(lambda: closure(BAD))
        assert guard.num_skipped == 1
        assert before.equal(model.weight)
