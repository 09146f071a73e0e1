"""The hook on `step`: other code's wrappers, copies, several guards."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from guarding import assert_same, batches, hooks_of, make, train_step
from skipping import BAD, X, run
from torch import nn
from torch.amp.grad_scaler import GradScaler

from overflow_fast import OverflowGuard
from overflow_fast.guard.optimizers.last_steps import LastSteps


@pytest.mark.parametrize("comes", ["before", "after"])
def test_a_skipped_step_runs_pre_hooks_and_no_post_hooks(comes):
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
        assert called == ["pre"]  # they may write to gradients
        run(model, optimizer)
        assert called == ["pre", "pre", "post"]


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
    assert len(called) == 3  # a skipped step has called its pre-hooks
    guard.remove()
    run(model, optimizer, BAD)  # nobody judges it any more
    assert model.weight.isnan().any()


def test_a_scheduler_between_two_guards_keeps_its_wrapper(caplog):
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = OverflowGuard(model, optimizer, "skip")
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    wrapped = optimizer.step
    first.remove()
    second = OverflowGuard(model, optimizer, "skip")
    run(model, optimizer, BAD)
    second.remove()
    assert second.num_skipped == 1
    assert optimizer.step == wrapped
    assert "failed" not in caplog.text


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
        assert hooks_of(model, other) == hooks_of(model)
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
        # With pre-hooks the wrapper has called the step before the guard judges it.
        assert given.step_was_skipped == (i == 1 and not is_fused)
    assert (guard.step, guard.num_skipped) == (3, 1)
    assert len(calls) == 2 + is_fused  # the scaler itself leaves out others
    guard.remove()


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


def test_of_weights_that_came_since_the_last_step_no_earlier_shape_is_known():
    model, late = nn.Linear(3, 1), nn.Parameter(torch.ones(1))
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1), LastSteps()
    assert steps.shape_before(optimizer, model.weight) is None
    steps.note(optimizer)
    optimizer.add_param_group({"params": [late]})
    assert steps.shape_before(optimizer, late) is None
