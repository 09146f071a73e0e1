"""Several optimizers: one verdict for a round, and how steps are counted."""

import json

import pytest
import torch
from guarding import INF, NAN, plant
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.guard.monitors.monitor import Monitor, Notice

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
BAD = X.clone()
BAD[0, 0] = NAN


def split(is_reversed=False):
    """A model whose matrices and vectors have an optimizer each."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
    parts = [[p for p in model.parameters() if p.dim() == d] for d in (2, 1)]
    parts = parts[::-1] if is_reversed else parts
    return model, [torch.optim.SGD(part, lr=0.1) for part in parts]


def step_all(optimizers):
    for optimizer in optimizers:
        optimizer.step()


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def is_same(model, before):
    return all(a.equal(b) for a, b in zip(model.parameters(), before, strict=True))


def bad_forward(model):
    model(BAD).sum().backward()


def bad_backward(model):
    with plant(model[0], INF, backward=True):
        model(X).sum().backward()


def bad_matrix(model):
    model(X).sum().backward()
    model[2].weight.grad[0, 0] = NAN


def bad_vector(model):
    model(X).sum().backward()
    model[0].bias.grad[0] = NAN


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("spoil", [bad_forward, bad_backward, bad_matrix, bad_vector])
def test_what_is_bad_holds_for_all_in_any_order(spoil, is_reversed):
    model, optimizers = split(is_reversed)
    with OverflowGuard(model, optimizers, "skip") as guard:
        model(X).sum().backward()
        step_all(optimizers)
        before = values(model)
        for optimizer in optimizers:
            optimizer.zero_grad()
        spoil(model)
        step_all(optimizers)
        assert is_same(model, before)
        assert guard.last_step_skipped
        assert all(map(guard.was_skipped, optimizers))
        assert (guard.step, guard.num_skipped, guard.consecutive_skips) == (2, 1, 1)
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(X).sum().backward()
        step_all(optimizers)
        assert not is_same(model, before)
        assert not guard.last_step_skipped
        assert not any(map(guard.was_skipped, optimizers))


def test_a_guard_knows_its_own_optimizers_alone(as_kept):
    model, optimizers = split()
    with OverflowGuard(model, optimizers[:1], "skip") as guard:
        as_kept.error(ValueError, guard.was_skipped, optimizers[1])


def test_gradients_that_are_left_from_before_are_no_alarm():
    """In a GAN the generator's gradients are cleared right before its own backward."""
    model, (first, second) = split()
    with OverflowGuard(model, [first, second], "skip") as guard:
        bad_forward(model)
        step_all([first, second])
        first.zero_grad()  # and not those of the second
        before = values(model)
        kept = second.param_groups[0]["params"][0].grad
        loss = model(X).sum()
        loss.backward(inputs=first.param_groups[0]["params"])
        first.step()
        assert not guard.was_skipped(first)
        assert second.param_groups[0]["params"][0].grad is kept
        assert not is_same(model, before)


def test_gradients_of_a_skipped_optimizer_hold_up_no_other_one():
    """As where each turn of a GAN's loop begins with `zero_grad()`."""
    critic, generator = nn.Linear(4, 1), nn.Linear(6, 4)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (critic, generator)]
    with OverflowGuard([critic, generator], optimizers, "skip") as guard:
        skipped = []
        for x in (X, BAD, X):
            for fake, optimizer in zip(
                (generator(x).detach(), generator(x)), optimizers, strict=True
            ):
                optimizer.zero_grad()
                critic(fake).sum().backward()
                optimizer.step()
                skipped.append(guard.was_skipped(optimizer))
    assert skipped == [False, False, True, True, False, False]


@pytest.mark.parametrize("policy", ["warn", "raise"])
def test_a_round_has_one_report(policy, caplog):
    model, optimizers = split()
    with OverflowGuard(model, optimizers, policy) as guard:
        bad_forward(model)
        for optimizer in optimizers:
            if policy == "raise":
                with pytest.raises(NonFiniteError):
                    optimizer.step()
            else:
                optimizer.step()
        assert guard.step == 1
        assert guard.metrics()["bad_steps_total"] == 1
    alarms = [r for r in caplog.records if "inf/nan during" in r.getMessage()]
    assert len(alarms) == (policy == "warn")


def test_a_callable_decides_once_for_a_round():
    model, optimizers = split()
    asked = []

    def decide(report):
        asked.append(report.step)
        return "skip"

    before = values(model)
    with OverflowGuard(model, optimizers, decide):
        bad_forward(model)
        step_all(optimizers)
    assert asked == [0]
    assert is_same(model, before)


class Gan:
    """A critic that steps `per_round` times for each step of the generator."""

    def __init__(self, per_round=1):
        self.models = {"generator": nn.Linear(6, 6), "critic": nn.Linear(6, 1)}
        self.optimizers = {
            name: torch.optim.SGD(model.parameters(), lr=0.1)
            for name, model in self.models.items()
        }
        self.per_round = per_round

    def step(self, name, x):
        optimizer = self.optimizers[name]
        optimizer.zero_grad()
        if name == "critic":
            self.models["critic"](x).sum().backward()
        else:
            self.models["critic"](self.models["generator"](x)).sum().backward()
        optimizer.step()

    def round(self, x=X):
        for _ in range(self.per_round):
            self.step("critic", x)
        self.step("generator", X)


@pytest.mark.parametrize("per_round", [1, 3])
@pytest.mark.explains
def test_a_critic_that_stays_bad_raises_though_the_generator_is_clean(
    per_round, as_kept
):
    gan = Gan(per_round)
    guard = OverflowGuard(
        gan.models, list(gan.optimizers.values()), "skip", max_consecutive_skips=4
    )
    with guard, pytest.raises(NonFiniteError) as raised:
        for _ in range(10):
            gan.round(BAD)
    as_kept(raised.value)
    assert guard.num_skipped == 4


def test_a_bad_critic_alone_is_skipped_where_the_generator_stepped_before():
    gan = Gan()
    with OverflowGuard(gan.models, list(gan.optimizers.values()), "skip") as guard:
        before = values(gan.models["critic"])
        gan.step("generator", X)
        gan.step("critic", BAD)
        assert guard.last_step_skipped
        assert not guard.was_skipped(gan.optimizers["generator"])
        assert guard.was_skipped(gan.optimizers["critic"])
        assert is_same(gan.models["critic"], before)


@pytest.mark.parametrize("between", ["evaluation", "check", "bad evaluation"])
@pytest.mark.explains
def test_nothing_in_between_resets_the_count(between, as_kept):
    model, (optimizer, _) = split()
    guard = OverflowGuard(model, optimizer, "skip", max_consecutive_skips=3)
    with guard, pytest.raises(NonFiniteError) as raised:
        for done in range(10):
            bad_forward(model)
            optimizer.step()
            optimizer.zero_grad()
            if between == "check":
                guard.check()
            else:
                with torch.no_grad():
                    model(BAD if "bad" in between else X)
            assert (guard.consecutive_skips, guard.last_step_skipped) == (
                done + 1,
                True,
            )
    as_kept(raised.value)


class Rain(Monitor):
    may_skip = True

    def look(self, step):
        return [Notice("it rains", action="skip")]


SKIPPED_FOR = ["gradients", "update", "monitor", "later evaluation"]


@pytest.mark.parametrize("reason", SKIPPED_FOR)
def test_skips_in_a_row_are_limited_whatever_they_are_for(reason):
    model, is_good = nn.Linear(6, 1), [False]

    class Sometimes(Rain):
        def look(self, step):
            return [] if is_good[0] else super().look(step)

    monitors = [Sometimes()] if reason == "monitor" else []
    kind = torch.optim.LBFGS if reason == "later evaluation" else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=1e-3)
    options = {"max_consecutive_skips": 2, "explain": False, "monitors": monitors}

    def step():
        factor = {"gradients": INF, "update": 1e30}.get(reason, 1.0)
        evaluated = []

        def closure():
            evaluated.append(reason)
            optimizer.zero_grad()
            is_later = reason == "later evaluation" and len(evaluated) == 2
            own = NAN if is_later else factor
            loss = (model(X) ** 2).sum() * (1.0 if is_good[0] else own)
            loss.backward()
            return loss

        if reason == "later evaluation":
            return optimizer.step(closure)
        closure()
        return optimizer.step()

    with OverflowGuard(model, optimizer, "skip", **options) as guard:
        for count in (1, 2):
            step()
            assert guard.consecutive_skips == guard.num_skipped == count
        is_good[0] = True
        step()
        assert guard.consecutive_skips == 0 and not guard.last_step_skipped
        is_good[0] = False
        for _ in range(2):
            step()
        before = values(model)
        with pytest.raises(NonFiniteError, match="were skipped"):
            step()
        assert is_same(model, before) and guard.num_skipped == 4


def test_a_finite_step_that_a_monitor_skips_ends_a_row_of_bad_ones(caplog):
    model, (optimizer, _) = split()
    options = {"monitors": [Rain()], "explain": False}
    with OverflowGuard(model, optimizer, "skip", **options):
        for x in (X, BAD, X, BAD):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "in a row" not in caplog.text


def test_21_optimizers_that_step_in_backward():
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(11)])
    model.append(nn.BatchNorm1d(6))
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]

    def step_with(optimizer):
        def hook(parameter):
            optimizer.step()
            optimizer.zero_grad()

        return hook

    for optimizer in optimizers:
        parameter = optimizer.param_groups[0]["params"][0]
        parameter.register_post_accumulate_grad_hook(step_with(optimizer))
    with OverflowGuard(model, optimizers, "skip") as guard:
        for i, x in enumerate((X, BAD, X)):
            before, mean = values(model), model[-1].running_mean.clone()
            model(x).sum().backward()
            assert guard.last_step_skipped == (i == 1)
            assert is_same(model, before) == (i == 1)
            assert mean.equal(model[-1].running_mean) == (i == 1)
        assert (guard.step, guard.num_skipped) == (3, 1)


def test_the_log_has_a_line_for_each_round(tmp_path):
    model, optimizers = split()
    path = tmp_path / "guard.jsonl"
    with OverflowGuard(model, optimizers, "skip", log=path):
        for spoil in (None, bad_forward, bad_vector):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(X).sum().backward() if spoil is None else spoil(model)
            step_all(optimizers)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line for line in lines if "is_clean" in line]
    assert [(line["step"], line["is_clean"]) for line in steps] == [
        *((0, True), (1, False), (2, False))
    ]


def test_lbfgs_is_one_step_and_one_line(tmp_path):
    model, _ = split()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=5)
    path = tmp_path / "guard.jsonl"
    calls = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = (model(X) ** 2).mean()
        loss.backward()
        return loss

    with OverflowGuard(model, optimizer, "skip", log=path) as guard:
        optimizer.step(closure)
        assert guard.step == 1
    assert len(calls) > 2
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len([line for line in lines if "is_clean" in line]) == 1


@pytest.mark.explains
def test_steps_that_nobody_watches_reset_no_count(as_kept):
    model, (optimizer, _) = split()
    guard = OverflowGuard(model, optimizer, "skip", schedule=2, max_consecutive_skips=2)
    with guard, pytest.raises(NonFiniteError) as raised:
        for i in range(10):
            optimizer.zero_grad()
            model(X if i % 2 else BAD).sum().backward()
            optimizer.step()
    as_kept(raised.value)


def test_an_optimizer_whose_step_cannot_be_replaced_is_judged_all_the_same():
    class Fixed(torch.optim.SGD):
        def __setattr__(self, name, value):
            if name == "step":
                raise AttributeError("step is fixed")
            super().__setattr__(name, value)

    model, _ = split()
    optimizer = Fixed(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "skip") as guard:
        before = values(model)
        bad_forward(model)
        optimizer.step()
        assert is_same(model, before)
        assert guard.num_skipped == 1
