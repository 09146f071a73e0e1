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


class Alternates(TwoPasses):
    """Computes a second gradient in each third step only: LookSAM."""

    def step(self, closure):
        if self.calls % 3 == 0:
            return super().step(closure)
        self.calls += 1
        return descend(self)


class Decays(FirstDevice):
    """Moves the weights, and computes its gradients afterwards."""

    def step(self, closure):
        for p in self.param_groups[0]["params"]:
            p.data = p.data.clone()
            p.detach().mul_(0.9)
        with torch.enable_grad():
            loss = closure()
        descend(self)
        return loss


class Evaluates(FirstDevice):
    """Computes its gradients before all else, as torch's optimizers do."""

    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        descend(self)
        return loss


@pytest.mark.parametrize("is_hooked", [False, True])
@pytest.mark.parametrize("policy", ["skip", "raise"])
@pytest.mark.parametrize("bad_step", range(1, 5))
def test_a_step_that_does_not_call_its_closure_is_judged_at_its_start(
    bad_step, policy, is_hooked, caplog
):
    model = nn.Linear(6, 1)
    optimizer = Alternates(model.parameters())
    if is_hooked:
        optimizer.register_step_pre_hook(lambda *_: None)
    with OverflowGuard(model, optimizer, policy, explain=False) as guard:
        for step in range(6):
            x = BAD if step == bad_step else X
            before = snapshot(model, optimizer)
            optimizer.zero_grad()
            model(x).sum().backward()
            if step == bad_step and policy == "raise":
                with pytest.raises(NonFiniteError):
                    optimizer.step(lambda x=x: model(x).sum())
            else:
                optimizer.step(lambda x=x: model(x).sum())
            if step == bad_step:
                assert guard.last_report.step == step
                assert guard.last_report.verdict.first.kind == "input"
                assert_same(snapshot(model, optimizer), before)
        assert guard.step == 6 and guard.metrics()["bad_steps_total"] == 1
    assert "no step was judged" not in caplog.text


def test_a_weight_that_was_bad_at_the_start_of_a_step_is_not_said_to_be_put_back():
    model = nn.Linear(6, 1)
    optimizer = Alternates(model.parameters())
    with OverflowGuard(model, optimizer, "skip", explain=False):
        model(X).sum().backward()
        optimizer.step(lambda: model(X).sum())
        model.weight.data.fill_(NAN)
        model(X).sum().backward()
        with pytest.raises(NonFiniteError, match="It stays non-finite"):
            optimizer.step(lambda: model(X).sum())


def test_a_step_without_gradients_that_ignores_its_closure_is_judged(caplog):
    """Of the first one it is not known that it does."""

    class Ignores(FirstDevice):
        def step(self, closure):
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1)

    model = nn.Linear(6, 1)
    optimizer = Ignores(model.parameters())
    with OverflowGuard(model, optimizer, "skip", explain=False) as guard:
        for _ in range(8):
            model(X)
            optimizer.step(lambda: None)
        model(BAD)
        optimizer.step(lambda: None)
        assert guard.num_skipped == 1 and guard.last_report.step == 8
    assert "no step was judged" not in caplog.text


@pytest.mark.parametrize("kind", [TwoPasses, Evaluates])
def test_a_step_that_is_skipped_at_its_start_has_a_loss_of_nan(kind):
    """One that calls its closure before all else calls it there, too."""
    model = nn.Linear(6, 1)
    optimizer = kind(model.parameters())
    called = []

    def closure(x=X):
        called.append(x)
        loss = model(x).sum()
        loss.backward()
        return loss

    with OverflowGuard(model, optimizer, "skip", explain=False) as guard:
        for x in (X, BAD, X):
            optimizer.zero_grad()
            closure(x)  # of which it accumulates the gradient
            loss = optimizer.step(closure)
            assert guard.last_step_skipped == (x is BAD)
            assert loss.isnan() == (x is BAD and kind is TwoPasses)
        assert guard.num_skipped == 1
    assert len(called) == (6 if kind is Evaluates else 5)


@pytest.mark.parametrize("kind", [TwoPasses, Decays, Evaluates])
def test_gradients_that_a_skipped_step_has_left_are_not_judged_again(kind):
    model = nn.Linear(6, 1)
    optimizer = kind(model.parameters())

    def closure(x):
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss

    with OverflowGuard(model, optimizer, "skip", explain=False) as guard:
        for x in (X, BAD, X, X):
            if kind is TwoPasses:  # which uses them
                optimizer.zero_grad()
            optimizer.step(lambda x=x: closure(x))
        assert guard.num_skipped == 1 and guard.last_report.step == 1
