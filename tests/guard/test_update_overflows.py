"""Finite gradients that an optimizer makes a non-finite state, or weight, of."""

import importlib.util
import itertools
import sys
import time

import numpy as np
import pytest
import torch
from guarding import assert_same, state_of
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.explainer import optimizer_step
from overflow_fast.guard.optimizers import updates
from overflow_fast.guard.report.causes import BAD_SETTING

LARGE = 1e22  # its square is beyond float32


class Squares(torch.optim.Optimizer):
    """An optimizer that is not torch's, with a state of its own."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("square", torch.zeros_like(p))
                mean.mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                p.addcdiv_(p.grad, mean.sqrt() + 1e-8, value=-group["lr"])
        return loss


class Rescaled(torch.optim.Optimizer):
    """Divides by the norm of its update, which is 0 where the gradient is."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 1.0)
                ratio = p.norm() / mean.norm()
                p.add_(mean * ratio, alpha=-group["lr"])


class InverseRoot(torch.optim.Optimizer):
    """Adds eps behind the rsqrt, which is inf where all gradients were 0."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                square = p.grad.square()
                inverse = square.rsqrt().add_(1e-8)
                p.add_(p.grad * inverse, alpha=-group["lr"])


class Debiased(torch.optim.Optimizer):
    """Divides by what is 0 in its first step, or in its second."""

    def __init__(self, params, begins):
        super().__init__(params, {"begins": begins})

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        for p in group["params"]:
            scale = self.state[p].setdefault("scale", torch.tensor(group["begins"]))
            if p.grad is not None:
                p.add_(p.grad / scale.abs(), alpha=-1e-2)
                scale.add_(1)


class InHalf(torch.optim.Optimizer):
    """Casts gradients to a narrow dtype itself, in whatever dtype the weights are."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad.to(torch.float16).to(p.dtype), alpha=-1e-8)


class WithNumber(InHalf):
    """Has a number of its own, where torch copies state and groups alone."""

    def __init__(self, params):
        super().__init__(params)
        self.num_steps = 0

    def step(self):
        super().step()
        self.num_steps += 1


class WithAttribute(InHalf):
    """Needs what a copy of it has not: what a step may change is not copied."""

    def __init__(self, params):
        super().__init__(params)
        self.num_steps = itertools.count()

    def step(self):
        super().step()
        next(self.num_steps)


def eight_bits(params):
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, lr=1e-2, block_size=4)


OVERFLOWING = {
    "Adam": torch.optim.Adam,
    "Adam, foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "Adam, fused": lambda p: torch.optim.Adam(p, fused=True),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "not torch's": Squares,
}
OTHERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-30),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=1e-30, momentum=0.9),
    "Adamax": torch.optim.Adamax,
    "Rprop": torch.optim.Rprop,
}


def make(kind):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, (kind(model.parameters()))


def step(model, optimizer, scale=1.0, how="plain"):
    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(3, 4)) * scale).sum()
        loss.backward()
        return loss

    if how == "closure":
        return optimizer.step(closure)
    closure()
    return optimizer.step()


@pytest.mark.parametrize("how", ["plain", "closure"])
@pytest.mark.parametrize("name", OVERFLOWING)
@pytest.mark.explains
def test_a_state_that_overflows_is_reported_and_the_step_undone(name, how):
    model, optimizer = make(OVERFLOWING[name])
    with OverflowGuard(model, optimizer, "skip") as guard:
        step(model, optimizer, how=how)
        assert guard.last_report is None
        before = state_of(model, optimizer)
        step(model, optimizer, LARGE, how)
        report = guard.last_report
        assert report.step == 1 and report.moment == "before"
        assert report.action == "skip" and guard.num_skipped == 1
        assert_same(state_of(model, optimizer), before)
        assert report.verdict.origin.source == "update"
        assert report.explanation.phase == "optimizer"
        if report.verdict.first.kind == "optimizer_state":
            assert report.explanation.cause == "range overflow"
        step(model, optimizer, how=how)  # and it goes on
        assert guard.num_skipped == 1 and guard.last_report is report


@pytest.mark.parametrize("name", OTHERS)
def test_optimizers_whose_state_holds_it_are_not_blamed(name):
    model, optimizer = make(OTHERS[name])
    with OverflowGuard(model, optimizer) as guard:
        step(model, optimizer)
        step(model, optimizer, LARGE)
        assert guard.last_report is None
    assert all(p.isfinite().all() for p in model.parameters())


def test_raising_undoes_the_step():
    model, optimizer = make(torch.optim.AdamW)
    guard = OverflowGuard(model, optimizer)
    step(model, optimizer)
    before = state_of(model, optimizer)
    with pytest.raises(NonFiniteError) as raised:
        step(model, optimizer, LARGE)
    report = raised.value.report
    assert_same(state_of(model, optimizer), before)
    assert report.verdict.first.label == "bias.exp_avg_sq" or "weight" in (
        report.verdict.first.label
    )
    assert guard.step == 2 and guard.metrics()["bad_steps_total"] == 1
    guard.remove()


def test_a_guard_that_warns_makes_the_step_and_says_so(caplog):
    model, optimizer = make(torch.optim.Adam)
    with OverflowGuard(model, optimizer, "warn") as guard:
        step(model, optimizer, LARGE)
        assert guard.last_report.action == "warn"
        assert optimizer.state[model.weight]["exp_avg_sq"].isinf().all()
        step(model, optimizer)
        assert guard.metrics()["bad_steps_total"] == 1  # it is of that step alone


def scaled_steps(model, optimizer, *scales):
    """Makes steps from a new state each, of a batch that has the scale."""
    for scale in scales:
        optimizer.zero_grad()
        optimizer.state.clear()
        model(torch.full((3, 4), scale)).sum().backward()
        optimizer.step()
        yield scale


@pytest.mark.explains
def test_a_second_update_that_is_bad_alike_is_not_explained_again():
    model, optimizer = make(torch.optim.Adam)
    with OverflowGuard(model, optimizer, "skip") as guard:
        steps = scaled_steps(model, optimizer, LARGE, 1.0, LARGE)
        found = [guard.last_report.explanation for _ in steps]
    assert found[0].cause == "range overflow" and found[-1] is None


@pytest.mark.explains
def test_what_an_update_takes_is_the_guards_but_for_its_explanation(monkeypatch):
    def slow(*given):
        time.sleep(0.2)
        return made(*given)

    model, optimizer = make(torch.optim.Adam)
    made, costs = updates.OptimizerSnapshot, []
    with OverflowGuard(model, optimizer, "skip") as guard:
        monkeypatch.setattr(updates, "OptimizerSnapshot", slow)
        costs += [guard.cost for _ in scaled_steps(model, optimizer, LARGE)]
        monkeypatch.undo()
        made = optimizer_step.explain_seen_update
        monkeypatch.setattr(optimizer_step, "explain_seen_update", slow)
        guard.step = 1000  # another place is explained after some steps
        nn.init.constant_(model.bias, 1.0)
        optimizer.param_groups[0]["lr"] = float("inf")
        costs += [guard.cost for _ in scaled_steps(model, optimizer, 1.0)]
        assert guard.last_report.explanation.cause == BAD_SETTING.name
    assert costs[0].guard_seconds > 0.2 > costs[1].guard_seconds


@pytest.mark.explains
def test_the_batch_of_a_bad_update_is_not_the_healthy_one():
    model, optimizer = make(torch.optim.Adam)
    with OverflowGuard(model, optimizer, "skip") as guard:
        for scale in scaled_steps(model, optimizer, 1.0, LARGE):
            assert (guard._parts.keeper.clean is None) == (scale == LARGE)
        assert guard.num_skipped == 1


def test_a_state_that_was_bad_before_is_not_of_this_step():
    model, optimizer = make(torch.optim.Adam)
    step(model, optimizer)
    optimizer.state[model.weight]["exp_avg_sq"].fill_(float("inf"))
    with OverflowGuard(model, optimizer, "warn") as guard:
        step(model, optimizer, LARGE)
        assert guard.last_report is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_states_of_narrow_dtypes(dtype):
    model, optimizer = make(torch.optim.Adam)
    model.to(dtype)
    large = 30_000.0 if dtype is torch.float16 else LARGE
    with OverflowGuard(model, optimizer, "skip") as guard:
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.full_like(p, large)
            optimizer.step()
        assert guard.num_skipped == 2
        assert guard.last_report.verdict.origin.source == "update"


@pytest.mark.explains
def test_a_learning_rate_that_takes_a_weight_out_of_range_is_of_its_own_step():
    model, optimizer = make(lambda p: torch.optim.SGD(p, lr=1e20))
    with OverflowGuard(model, optimizer, "skip") as guard:
        before = state_of(model, optimizer)
        step(model, optimizer, 1e20)
        report = guard.last_report
        assert report.step == 0 and guard.num_skipped == 1
        assert report.verdict.first.kind == "weight"
        found = report.explanation
        assert (found.cause, found.op.name) == ("range overflow", "aten.add_.Tensor")
        assert_same(state_of(model, optimizer), before)


@pytest.mark.parametrize("kind", [int, torch.tensor, float, np.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_large_rate_counts_whatever_type_it_has(kind, dtype):
    model, optimizer = make(lambda p: torch.optim.SGD(p, lr=1e-9, foreach=False))
    model.to(dtype)
    rate, size = (10**10, 3e30) if dtype is torch.float32 else (3 * 10**4, 4.0)
    optimizer.param_groups[0]["lr"] = kind(rate)
    with OverflowGuard(model, optimizer, "skip", explain=False) as guard:
        for p in model.parameters():
            p.grad = torch.full_like(p, size)
        before = state_of(model)
        optimizer.step()
        assert guard.num_skipped == 1
        assert_same(state_of(model), before)


def of_two_groups(parameters):
    first, second = parameters
    return torch.optim.Adam(
        [{"params": [first]}, {"params": [second], "betas": (0.9, 0.1)}]
    )


class Sums(Squares):
    """It adds squares up, and says by which decay."""

    def __init__(self, params):
        super().__init__(params)
        self.param_groups[0]["betas"] = (0.9, 0.99)

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            total = self.state[p].setdefault("square", torch.zeros_like(p))
            total.mul_(0.99).addcmul_(p.grad, p.grad)


HALF, WIDE = torch.float16, torch.float32
SUMS = {
    "momentum of 0.99": (
        lambda p: torch.optim.SGD(p, lr=1e-6, momentum=0.99),
        *(HALF, 3000.0, 25),
    ),
    "momentum of 0.999": (
        lambda p: torch.optim.SGD(p, lr=1e-30, momentum=0.999),
        *(WIDE, 3e36, 150),
    ),
    "momentum of 1": (
        lambda p: torch.optim.SGD(p, lr=1e-6, momentum=1.0),
        *(HALF, 3000.0, 25),
    ),
    "a mean of squares": (torch.optim.Adam, HALF, 1000.0, 80),
    "alpha": (lambda p: torch.optim.RMSprop(p, alpha=0.9), HALF, 700.0, 4),
    "a later group": (of_two_groups, HALF, 300.0, 1),
    "squares that are added up": (torch.optim.Adagrad, HALF, 30.0, 80),
    "of no torch optimizer": (Sums, WIDE, 5e18, 20),
}


@pytest.mark.parametrize("name", SUMS)
def test_what_adds_up_over_steps_is_seen_in_the_step_that_overflows(name):
    kind, dtype, size, steps = SUMS[name]
    model = nn.Linear(2, 1).to(dtype)
    optimizer = kind(list(model.parameters()))
    with OverflowGuard(model, optimizer, "skip", explain=False) as guard:
        for _ in range(steps):
            for p in model.parameters():
                p.grad = torch.full_like(p, size)
            before = state_of(model, optimizer)
            optimizer.step()
            if guard.num_skipped:
                break
        assert guard.num_skipped == 1
        assert_same(state_of(model, optimizer), before)


def test_weights_that_are_converted_have_another_maximum():
    model, optimizer = make(torch.optim.Adam)
    with OverflowGuard(model, optimizer, "skip", explain=False) as guard:
        step(model, optimizer, 300.0)
        model.half()
        optimizer.state.clear()
        for p in model.parameters():
            p.grad = torch.full_like(p, 60_000.0)
        optimizer.step()
        assert guard.num_skipped == 1


def test_a_round_of_several_optimizers_has_one_report():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    first, second = (torch.optim.Adam(each.parameters()) for each in model)
    with OverflowGuard(model, [first, second], "skip") as guard:
        (model(torch.ones(3, 4)) * LARGE).sum().backward()
        before = state_of(model)
        first.step()
        second.step()
        assert guard.num_skipped == 1 and guard.metrics()["bad_steps_total"] == 1
        assert_same(state_of(model), before)


def test_clean_steps_copy_nothing(monkeypatch):
    model, optimizer = make(torch.optim.Adam)
    made = []
    name = "overflow_fast.guard.optimizers.optimizer_hook"
    monkeypatch.setattr(sys.modules[name], "OptimizerSnapshot", made.append)
    with OverflowGuard(model, optimizer):
        for _ in range(3):
            step(model, optimizer, 100.0)
    assert not made


@pytest.mark.explains
def test_a_gradient_of_0_that_an_optimizer_divides_by_is_seen_in_its_step():
    model, optimizer = make(Rescaled)
    with OverflowGuard(model, optimizer, "skip") as guard:
        for _ in range(4):
            step(model, optimizer)
        before = state_of(model, optimizer)
        step(model, optimizer, 0.0)
        report = guard.last_report
        assert report.step == 4 and guard.num_skipped == 1
        assert_same(state_of(model, optimizer), before)
        found = report.explanation
        assert (found.cause, found.op.name) == ("undefined", "aten.div.Tensor")
        assert found.op.code == "ratio = p.norm() / mean.norm()"
        assert found.remedies[0].is_finite
        step(model, optimizer)
        assert guard.num_skipped == 1


class OfBase(torch.optim.Optimizer):
    """Has another optimizer make its steps, whose groups, or state, it shares."""

    def __init__(self, params, base=Rescaled):
        super().__init__(params, {})
        self.base = base(self.param_groups)
        self.param_groups = self.base.param_groups
        self.num_steps = 0

    def step(self):
        self.base.step()
        self.num_steps += 1


class Normalizes(OfBase):
    """Keeps a direction in each second step, of a gradient at weights that it moves."""

    def __init__(self, params):
        super().__init__(params, lambda groups: torch.optim.SGD(groups, lr=1e-2))

    @torch.no_grad()
    def step(self, closure):
        for p in self.param_groups[0]["params"]:
            if self.num_steps % 2 == 0:
                p.add_(p.grad, alpha=1e-3)
        if self.num_steps % 2 == 0:
            torch.enable_grad()(closure)()
        for p in self.param_groups[0]["params"]:
            if self.num_steps % 2 == 0:
                self.state[p]["direction"] = p.grad / p.grad.norm()
            else:
                p.grad.add_(self.state[p]["direction"], alpha=1e-3)
        super().step()


def of_base_steps(kind, scales, guarded):
    """Makes steps; returns the model, the optimizer and the report, if there is one."""
    model, optimizer = make(kind)
    given = torch.ones(3, 4)

    def closure(scale):
        optimizer.zero_grad()
        loss = (model(given) * scale).sum()
        loss.backward()

    guard = OverflowGuard(model, optimizer, "warn") if guarded else None
    for scale in scales:
        closure(scale)
        closures = [lambda scale=scale: closure(scale)] * (kind is Normalizes)
        optimizer.step(*closures)
    report = None
    if guard is not None:
        report = guard.last_report
        guard.remove()
    return model, optimizer, report


@pytest.mark.explains
@pytest.mark.parametrize(
    ("kind", "kind_of_first", "line"),
    [
        (OfBase, "weight", "ratio = p.norm() / mean.norm()"),
        (
            Normalizes,
            "optimizer_state",
            'self.state[p]["direction"] = p.grad / p.grad.norm()',
        ),
    ],
)
def test_a_step_with_a_base_or_a_closure_is_made_again_on_copies(
    kind, kind_of_first, line
):
    scales = [1.0, 1.0, 1.0, 1.0, 0.0]
    model, optimizer, report = of_base_steps(kind, scales, guarded=True)
    assert report.step == 4 and report.verdict.first.kind == kind_of_first
    found = report.explanation
    assert (found.cause, found.op.code) == ("undefined", line)
    assert found.remedies[0].is_finite
    is_late = "with the gradients that it has left" in found.evidence[-1]
    assert is_late == (kind is Normalizes)
    # What was made again has written to nothing of the program's.
    alone, others, _ = of_base_steps(kind, scales, guarded=False)
    assert_same(state_of(model, optimizer.base), state_of(alone, others.base))
    assert_same(state_of(model, optimizer), state_of(alone, others))


class KeepsFirst(Squares):
    """Keeps the gradient that it begins with, in a narrow dtype."""

    @torch.no_grad()
    def step(self, closure):
        for p in self.param_groups[0]["params"]:
            self.state[p]["first"] = p.grad.half()
            p.add_(p.grad, alpha=1e-3)
        torch.enable_grad()(closure)()


def test_what_was_doubted_at_the_start_of_a_step_is_judged_at_its_end():
    model, optimizer = make(KeepsFirst)

    def closure(scale):
        optimizer.zero_grad()
        (model(torch.ones(3, 4)) * scale).sum().backward()

    with OverflowGuard(model, optimizer, "skip", explain=False) as guard:
        for scale in (1.0, 1.0, 1.0, 1e5):
            closure(scale)
            optimizer.step(lambda: closure(1.0))
        assert guard.num_skipped == 1 and guard.last_report.step == 3
        assert optimizer.state[model.weight]["first"].isfinite().all()


class DirectionOnce(Squares):
    """Keeps a direction in the first of all steps, those of copies included."""

    num_steps = 0

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if not DirectionOnce.num_steps:
                self.state[p]["direction"] = p.grad / p.grad.norm()
        DirectionOnce.num_steps += 1


@pytest.mark.explains
def test_a_step_that_is_made_again_without_the_state_is_not_said_to_fail():
    model, optimizer = make(DirectionOnce)
    with OverflowGuard(model, optimizer, "skip") as guard:
        step(model, optimizer, 0.0)
    found = guard.last_report.explanation
    assert (found.cause, found.notes) == ("unknown", [])
    assert DirectionOnce.num_steps == 2


class HalfOfClosure(InHalf):
    """Calls backward itself, of the loss that its closure returns."""

    @torch.no_grad()
    def step(self, closure):
        for p in self.param_groups[0]["params"]:
            p.grad = None
        torch.enable_grad()(closure)().backward()
        super().step()


@pytest.mark.explains
def test_a_closure_that_is_made_again_has_the_gradient_once():
    model, optimizer = make(HalfOfClosure)
    with OverflowGuard(model, optimizer, "skip") as guard:
        optimizer.step(lambda: (model(torch.ones(3, 4)) * 1e5).sum())
        # It is judged before its backward.
        assert guard.last_report.explanation.reason.startswith("300000 is beyond")


class RescaledRows(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            size = p.grad.norm(dim=-1, keepdim=True)
            p -= 1e-3 * p.grad / size


@pytest.mark.explains
def test_rows_whose_gradient_is_0_are_counted():
    table = nn.Embedding(6, 3)
    optimizer = RescaledRows(table.parameters())
    with OverflowGuard(table, optimizer, "skip") as guard:
        table(torch.tensor([0, 4])).square().sum().backward()
        optimizer.step()
        found = guard.last_report.explanation
    where = "4 of 6 rows of its gradient are 0, where these values lie"
    assert (found.cause, found.reason) == ("undefined", where)


@pytest.mark.explains
def test_a_gradient_of_0_is_named_with_the_weights_that_were_0():
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
    nn.init.zeros_(model[2].weight)
    optimizer = RescaledRows(model.parameters())
    with OverflowGuard(model, optimizer, "skip") as guard:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        first = str(guard.last_report).splitlines()[0]
    others = "as is that of 1 other weight, and `2.weight` was 0."
    assert first.endswith(f": its gradient is 0 throughout, {others}")


@pytest.mark.explains
def test_in_an_optimizers_step_eps_stands_outside_of_the_root():
    """No gradient goes through it, and inside of the root it would be as large."""
    model, optimizer = make(InverseRoot)
    with OverflowGuard(model, optimizer, "skip") as guard:
        step(model, optimizer, 0.0)
        found = guard.last_report.explanation
    assert "rsqrt(0)" in str(found).splitlines()[0]
    remedy = found.remedies[0]
    assert remedy.code == "inverse = (square.sqrt() + 1e-8).reciprocal().add_(1e-8)"
    assert "tried with" not in remedy.text


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_steps_of_an_optimizer_that_is_not_torchs_are_looked_at(first):
    model, optimizer = make(lambda params: Debiased(params, -first))
    before = []
    with OverflowGuard(model, optimizer) as guard:
        with pytest.raises(NonFiniteError) as raised:
            for _ in range(2):
                before = [p.detach().clone() for p in model.parameters()]
                step(model, optimizer)
    assert raised.value.report.step == first == guard.step - 1
    assert_same(before, [p.detach().clone() for p in model.parameters()])


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_steps_of_a_weight_that_is_trained_later_are_looked_at(first):
    model, optimizer = make(lambda params: Debiased(params, 5))
    late = next(model.parameters()).requires_grad_(False)
    optimizer.state[late]["scale"] = torch.tensor(-first)
    with OverflowGuard(model, optimizer) as guard:
        for _ in range(5):
            step(model, optimizer)
        late.requires_grad_(True)
        with pytest.raises(NonFiniteError) as raised:
            for _ in range(2):
                step(model, optimizer)
    assert raised.value.report.step == 5 + first == guard.step - 1
    assert late.isfinite().all()


@pytest.mark.explains
@pytest.mark.parametrize("kind", [InHalf, WithNumber])
def test_the_largest_gradient_so_far_is_looked_at_behind_a_step_of_ones_own(kind):
    model, optimizer = make(kind)
    with OverflowGuard(model, optimizer, "skip") as guard:
        for scale in (1.0, 1.0, 1.0, 1e5):
            step(model, optimizer, scale)
    report = guard.last_report
    assert report.step == 3 and guard.num_skipped == 1
    assert report.explanation.cause == "range overflow"
    assert report.explanation.reason.endswith("beyond float16's maximum 65504")
    assert getattr(optimizer, "num_steps", 3) == 3


@pytest.mark.explains
def test_a_step_that_no_copy_can_make_is_said_to_be_such(as_kept):
    model, optimizer = make(WithAttribute)
    with OverflowGuard(model, optimizer, "skip") as guard:
        step(model, optimizer, 1e5)
    found = guard.last_report.explanation
    as_kept(found.cause, found.evidence, found.notes)


@pytest.mark.explains
def test_the_state_from_before_a_step_is_what_explains_it():
    """It is made again with what it was given, not with what it has left."""
    model, optimizer = make(lambda params: Debiased(params, -1))
    explained = []
    with OverflowGuard(model, optimizer, "skip", explain=True) as guard:
        for _ in range(2):
            step(model, optimizer)
            explained.append(guard.last_report)
    assert explained[0] is None
    found = explained[1].explanation
    assert (found.cause, found.op.name) == ("undefined", "aten.div.Tensor")
    assert optimizer.state[model.weight]["scale"] == 0


@pytest.mark.parametrize("scale", [0.0, 1.0])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, Squares])
def test_a_step_is_copied_where_a_gradient_is_0_for_an_unknown_optimizer(
    kind, scale, monkeypatch
):
    model, optimizer = make(kind)
    made, snapshot = [], updates.OptimizerSnapshot

    def noted(optimizer):
        made.append(optimizer)
        return snapshot(optimizer)

    with OverflowGuard(model, optimizer) as guard:
        for _ in range(3):
            step(model, optimizer)
        monkeypatch.setattr(updates, "OptimizerSnapshot", noted)
        step(model, optimizer, scale)
        assert guard.last_report is None
    assert bool(made) == (kind is Squares and scale == 0.0)


def test_a_part_that_is_idle_in_each_step_is_copied_in_few_of_them(monkeypatch):
    model, optimizer = make(Squares)
    copied, snapshot, number = [], updates.OptimizerSnapshot, 0

    def noted(optimizer):
        copied.append(number)
        return snapshot(optimizer)

    monkeypatch.setattr(updates, "OptimizerSnapshot", noted)
    with OverflowGuard(model, optimizer):
        for number in range(1, 20):
            optimizer.zero_grad()
            (model(torch.ones(3, 4)) - model.bias).sum().backward()
            if number == 11:
                model.weight.grad.zero_()  # more than before
            optimizer.step()
    assert copied == [1, 2, 4, 8, 11, 16]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)
def test_states_of_eight_bits():
    torch.manual_seed(0)
    model = nn.Linear(64, 64)  # smaller ones have no 8-bit state
    optimizer = eight_bits(model.parameters())
    guard = OverflowGuard(model, optimizer, "skip")
    model(torch.ones(3, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    (model(torch.ones(3, 64)) * LARGE).sum().backward()
    optimizer.step()
    assert guard.num_skipped == 1
    assert_same(before, [p.detach().clone() for p in model.parameters()])
    guard.remove()


@pytest.mark.parametrize("kind", [float, torch.tensor])
@pytest.mark.parametrize("rate", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["Adam", "Adam, fused", "not torch's", "SGD"])
@pytest.mark.explains
def test_a_rate_that_is_no_number_is_seen_in_its_step_which_is_undone(name, rate, kind):
    model, optimizer = make((OVERFLOWING | OTHERS)[name])
    with OverflowGuard(model, optimizer, "skip") as guard:
        step(model, optimizer)
        before, usual = state_of(model, optimizer), optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = kind(rate)
        step(model, optimizer)
        optimizer.param_groups[0]["lr"] = usual
        report = guard.last_report
        assert report.step == 1 and report.action == "skip"
        assert report.explanation.cause == BAD_SETTING.name
        assert str(rate) in report.explanation.evidence[0]
        assert_same(state_of(model, optimizer), before)
        step(model, optimizer)
        assert guard.num_skipped == 1


@pytest.mark.explains
def test_a_setting_that_no_update_reads_is_not_blamed():
    model, optimizer = make(torch.optim.Adam)
    optimizer.param_groups[0]["unused"] = float("nan")
    with OverflowGuard(model, optimizer, "skip") as guard:
        step(model, optimizer)
        step(model, optimizer, LARGE)
    report = guard.last_report
    assert report.explanation.cause == "range overflow"
    assert "unused" not in str(report)
