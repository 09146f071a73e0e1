"""A skipped step has not happened: optimizers of every kind, hooks, closures."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from guarding import NAN, assert_same, batches, make, state_of, train_step
from torch import nn
from torch.amp.grad_scaler import GradScaler

from overflow_fast import NonFiniteError, OverflowGuard

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


class Wrapper:
    """Has an optimizer as its `optimizer` and is none itself: Lookahead of timm."""

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


@pytest.mark.parametrize("comes", ["before", "after"])
def test_step_hooks_do_not_run_in_a_skipped_step(comes):
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called = []

    def register():
        optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
        optimizer.register_step_post_hook(lambda *_: called.append("post"))

    if comes == "before":
        register()
    with OverflowGuard(model, optimizer, "skip"):
        if comes == "after":
            register()
        run(model, optimizer, BAD)
        assert called == []
        run(model, optimizer)
        assert called == ["pre", "post"]


@pytest.mark.parametrize("comes", ["before", "after"])
def test_schedulers_wrap_the_step_before_or_after(comes):
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make_scheduler = torch.optim.lr_scheduler.ExponentialLR
    if comes == "before":
        scheduler = make_scheduler(optimizer, 0.5)
    guard = OverflowGuard(model, optimizer, "skip")
    if comes == "after":
        scheduler = make_scheduler(optimizer, 0.5)
    weights, called = [], []
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    for x in (X, BAD, X):
        run(model, optimizer, x)
        weights.append(model.weight.detach().clone())
        if not guard.last_step_skipped:
            scheduler.step()
    assert weights[0].equal(weights[1])
    assert not weights[1].equal(weights[2])
    assert scheduler.get_last_lr() == [0.025]
    assert len(called) == 2
    guard.remove()
    run(model, optimizer, BAD)  # nobody judges it any more
    assert model.weight.isnan().any()


def test_switching_off_gives_back_the_step_that_was_there():
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = optimizer.step.__func__
    guard = OverflowGuard(model, optimizer)
    assert "step" in vars(optimizer)
    for _ in range(3):
        guard.disable()
        assert "step" not in vars(optimizer)
        assert optimizer.step.__func__ is own
        guard.enable()
    guard.remove()

    def mine(closure=None):
        return "mine"

    optimizer.step = mine
    with OverflowGuard(model, optimizer) as guard:
        assert optimizer.step() == "mine"
        assert guard.step == 1
    assert optimizer.step is mine


def test_an_optimizer_under_guard_is_copied_pickled_and_freed_as_ever():
    model, optimizer = make()
    guard = OverflowGuard(model, optimizer, "skip")
    train_step(model, optimizer, batches(1)[0])
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert "step" not in vars(other)
        assert_same(other.state_dict(), optimizer.state_dict())
    guard.remove()
    gc.collect()
    gc.disable()
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = OverflowGuard(model, optimizer)
        reference = weakref.ref(optimizer)
        del optimizer
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("comes", ["before", "after"])
def test_accelerates_wrapper_with_a_scaler(is_fused, comes):
    accelerate = pytest.importorskip("accelerate.optimizer")
    pytest.importorskip("accelerate").Accelerator(cpu=True)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=is_fused)
    scaler = GradScaler("cpu", init_scale=4.0)
    given = optimizer
    if comes == "before":
        guard = OverflowGuard(model, optimizer, "skip")
    given = accelerate.AcceleratedOptimizer(optimizer, scaler=scaler)
    if comes == "after":
        guard = OverflowGuard(model, given, "skip")
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    for i, x in enumerate((X, BAD, X)):
        before = model.weight.detach().clone()
        scaler.scale(model(x).sum()).backward()
        given.step()
        given.zero_grad()
        assert guard.last_step_skipped == (i == 1)
        assert before.equal(model.weight) == (i == 1)
        assert given.step_was_skipped == (i == 1)
    assert (guard.step, guard.num_skipped, len(calls)) == (3, 1, 2)
    guard.remove()


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
def test_a_method_that_was_taken_before(kind, has_closure):
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
            with pytest.raises(RuntimeError, match="FirstDevice has to be skipped"):
                take(BAD)
        else:
            take(BAD)
        assert before.equal(model.weight)
        assert model.weight.grad is not None
        assert (guard.step, guard.num_skipped) == (2, 1)
        take(X)
        assert not before.equal(model.weight)


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


def test_a_closure_is_called_once_and_the_loss_returned():
    model, optimizer = make()
    calls = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = model(torch.full((4, 8), NAN), y=torch.zeros(4, 1))["loss"]
        loss.backward()
        return loss

    before = state_of(model, optimizer)
    with OverflowGuard(model, optimizer, "skip"):
        assert optimizer.step(closure=closure).isnan()
    assert len(calls) == 1
    assert_same(state_of(model, optimizer), before)


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
        optimizer.step(closure)
    assert before.equal(model.weight)


@pytest.mark.parametrize("policy", ["skip", lambda report: "skip"])
def test_a_weight_that_is_bad_already_raises(policy):
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, policy) as guard:
        run(model, optimizer)
        with torch.no_grad():
            model.weight[0, 2] = NAN
        with pytest.raises(NonFiniteError, match="skipping steps cannot repair it"):
            run(model, optimizer)
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


def test_two_guards_both_judge_a_step_that_one_of_them_skips():
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        OverflowGuard(model, optimizer, "skip") as first,
        OverflowGuard(model, optimizer, "skip") as second,
    ):
        run(model, optimizer, BAD)
        run(model, optimizer)
        for guard in (first, second):
            assert guard.last_report.step == 0
            assert (guard.step, guard.last_step_skipped) == (2, False)
    assert "step" not in vars(optimizer)


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


def test_lbfgs_by_a_method_that_was_taken_before():
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
        with pytest.raises(RuntimeError, match="No weight has changed"):
            taken(closure)
    assert_same(snapshot(model, optimizer), before)


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
    optimizer = TwoPasses(model.parameters())
    optimizer.wide = torch.zeros(1).expand(4)

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


def test_a_wrapper_that_hands_attributes_on():
    class Proxy:
        def __init__(self, optimizer):
            object.__setattr__(self, "optimizer", optimizer)

        def __setattr__(self, name, value):
            setattr(self.optimizer, name, value)

        def __getattr__(self, name):
            return getattr(self.optimizer, name)

        def step(self):
            self.optimizer.step()

    model = nn.Linear(6, 1)
    optimizer = Proxy(torch.optim.SGD(model.parameters(), lr=0.1))
    with OverflowGuard(model, optimizer, "skip") as guard:
        run(model, optimizer)
        before = model.weight.detach().clone()
        run(model, optimizer, BAD)
        assert before.equal(model.weight)
        assert guard.num_skipped == 1
    assert "step" not in vars(optimizer.optimizer)


def test_a_mock_in_the_place_of_step():
    from unittest import mock

    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step = mock.Mock()
    with OverflowGuard(model, optimizer, "skip") as guard:
        run(model, optimizer, BAD)
        assert guard.num_skipped == 1
        run(model, optimizer)
    assert optimizer.step.call_count == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_guards_that_are_removed_in_any_order_give_step_back(order):
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guards = [OverflowGuard(model, optimizer, "warn") for _ in range(2)]
    for i in order:
        guards[i].remove()
    assert "step" not in vars(optimizer)
