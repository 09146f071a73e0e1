"""Step pre-hooks of the program, which may write to gradients: judged behind them."""

import pytest
import torch
from guarding import assert_same, state_of
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from overflow_fast import NonFiniteError, OverflowGuard


def clip(optimizer, args, kwargs):
    """Divides by the norm: 0 / 0 where all gradients are 0."""
    own = [p.grad for group in optimizer.param_groups for p in group["params"]]
    norm = torch.stack([each.norm() for each in own]).norm()
    for each in own:
        each.div_(norm)


def make(kind=torch.optim.AdamW):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, kind(model.parameters(), lr=0.01)


def backward(model, factor):
    (model(torch.ones(2, 3)).mean() * factor).backward()


WHEN = ["before the guard", "behind the guard", "global"]


@pytest.mark.parametrize("policy", ["skip", "raise", "warn"])
@pytest.mark.parametrize("when", WHEN)
def test_a_nan_that_a_pre_hook_makes_is_of_its_own_step(model, optimizer, when, policy):
    post = []
    optimizer.register_step_post_hook(lambda *_: post.append(1))
    handle = None
    if when == "global":
        handle = register_optimizer_step_pre_hook(clip)
    elif when == "before the guard":
        optimizer.register_step_pre_hook(clip)
    with OverflowGuard(model, optimizer, policy, explain=False) as guard:
        if when == "behind the guard":
            optimizer.register_step_pre_hook(clip)
        for factor in (1.0, 0.0, 1.0):
            optimizer.zero_grad()
            backward(model, factor)
            before, num_made = state_of(model, optimizer), len(post)
            if factor == 0.0 and policy == "raise":
                with pytest.raises(NonFiniteError):
                    optimizer.step()
            else:
                optimizer.step()
            if factor == 0.0:
                report = guard.last_report
                assert report.step == 1 and report.action == policy
                assert report.moment == "before"
                assert report.verdict.first.kind == "gradient"
            if factor == 0.0 and policy != "warn":
                assert_same(state_of(model, optimizer), before)
                assert len(post) == num_made
            if policy == "warn" and factor == 0.0:
                break
        assert guard.metrics()["bad_steps_total"] == 1
    if handle is not None:
        handle.remove()


def test_a_pre_hook_that_repairs_gradients_lets_the_step_be_made(model, optimizer):
    def repair(optimizer, args, kwargs):
        for p in model.parameters():
            p.grad.nan_to_num_()

    optimizer.register_step_pre_hook(repair)
    watch = ("gradients", "weights")
    with OverflowGuard(model, optimizer, watch=watch, explain=False) as guard:
        backward(model, 1.0)
        model.weight.grad[0, 0] = torch.nan
        optimizer.step()
        assert guard.last_report is None


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.LBFGS])
@pytest.mark.parametrize("whose", ["given", "replaced", "added"])
def test_a_closure_is_judged_whosever_it_is(whose, kind):
    model, optimizer = make(kind)
    called = []

    def closure_of(factor):
        def closure():
            called.append(whose)
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).mean() * factor
            loss.backward()
            return loss

        return closure

    factors = iter((1.0, torch.nan, 1.0))
    now = [0.0]

    def replace(optimizer, args, kwargs):
        if whose == "given":
            return None
        if whose == "added":
            return args, {**kwargs, "closure": closure_of(now[0])}
        return (args[0], closure_of(now[0])), kwargs

    optimizer.register_step_pre_hook(replace)
    with OverflowGuard(model, optimizer, "skip", explain=False) as guard:
        for now[0] in factors:
            before = state_of(model, optimizer)
            is_bad = now[0] != now[0]
            outer = closure_of(now[0] if whose == "given" else 1.0)
            result = optimizer.step(*([] if whose == "added" else [outer]))
            assert called and isinstance(result, torch.Tensor)
            if is_bad:
                assert guard.last_step_skipped
                assert_same(state_of(model, optimizer), before)
        assert guard.num_skipped == 1 and guard.consecutive_skips == 0


def test_each_of_several_optimizers_is_judged_behind_its_own_hooks():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in model]
    optimizers[1].register_step_pre_hook(clip)
    with OverflowGuard(model, optimizers, "skip", explain=False) as guard:
        for spoils in (False, True):
            backward(model, 1.0)
            if spoils:
                for p in model[1].parameters():
                    p.grad.zero_()
            before = state_of(model[1])
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
        assert not guard.was_skipped(optimizers[0])
        assert guard.was_skipped(optimizers[1])
        assert_same(state_of(model[1]), before)


def test_a_scaler_steps_behind_them(model, optimizer, caplog):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.register_step_pre_hook(clip)
    with OverflowGuard(model, optimizer, "skip", explain=False) as guard:
        for factor in (1.0, 0.0, 1.0):
            scaler.scale(model(torch.ones(2, 3)).mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert guard.metrics()["bad_steps_total"] == 1 == guard.num_skipped
        assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("first", ["skip", "warn"])
def test_two_guards_judge_such_a_step_once_each(model, optimizer, first):
    optimizer.register_step_pre_hook(clip)
    inner = OverflowGuard(model, optimizer, first, explain=False)
    outer = OverflowGuard(model, optimizer, "skip", explain=False)
    for factor in (1.0, 0.0, 1.0):
        backward(model, factor)
        optimizer.step()
        optimizer.zero_grad()
    assert outer.num_skipped == 1 and all(
        p.isfinite().all() for p in model.parameters()
    )
    for each in (inner, outer):
        assert each.step == 3 and each.metrics()["bad_steps_total"] == 1
    inner.remove()
    outer.remove()
    assert "step" not in vars(optimizer)


def test_an_update_that_overflows_by_what_a_pre_hook_wrote_is_undone(model, optimizer):
    def enlarge(optimizer, args, kwargs):
        for p in model.parameters():
            p.grad.mul_(1e30)

    optimizer.register_step_pre_hook(enlarge)
    with OverflowGuard(model, optimizer, "skip", explain=False) as guard:
        before = state_of(model, optimizer)
        backward(model, 1.0)
        optimizer.step()
        assert guard.num_skipped == 1
        assert guard.last_report.verdict.origin.source == "update"
        assert_same(state_of(model, optimizer), before)


def test_a_pre_hook_that_raises_ends_the_step_as_the_programs_own(model, optimizer):
    def check(optimizer, args, kwargs):
        raise ValueError("own")

    optimizer.register_step_pre_hook(check)
    with OverflowGuard(model, optimizer, "skip", explain=False) as guard:
        backward(model, torch.nan)
        with pytest.raises(ValueError, match="own"):
            optimizer.step()
        assert guard.last_report.raised == "ValueError"


def test_a_wrapper_of_accelerates_steps_behind_them():
    accelerate = pytest.importorskip("accelerate")
    model, optimizer = make()
    optimizer.register_step_pre_hook(clip)
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    with OverflowGuard(model, optimizer, "skip", explain=False) as guard:
        for factor in (1.0, 0.0, 1.0):
            accelerator.backward(model(torch.ones(2, 3)).mean() * factor)
            optimizer.step()
            assert optimizer.step_was_skipped == (factor == 0.0)
            optimizer.zero_grad()
        assert guard.num_skipped == 1
        assert all(p.isfinite().all() for p in model.parameters())


def test_a_skipped_step_without_hooks_calls_nothing_of_the_optimizer(monkeypatch):
    model, optimizer = make()
    called = []
    monkeypatch.setattr(
        type(optimizer), "step", lambda *_: called.append(1), raising=True
    )
    with OverflowGuard(model, optimizer, "skip", explain=False):
        backward(model, torch.nan)
        optimizer.step()
    assert not called
