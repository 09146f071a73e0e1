"""The guard under torch.amp.GradScaler, whose business inf gradients are."""

import pytest
import torch
from guarding import INF, NAN, assert_same, batches, make, plant, state_of
from torch.amp.grad_scaler import GradScaler

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.guard.optimizers import scaler_hook


def scaled_step(model, optimizer, scaler, batch, spoil=None):
    """One step; `spoil` makes a scaled gradient inf, as too large a scale does."""
    optimizer.zero_grad()
    loss = model(batch[0], y=batch[1])["loss"]
    scaler.scale(loss).backward()
    if spoil is not None:
        model.head.weight.grad[0, 0] = spoil
    scaler.step(optimizer)
    scaler.update()


def scaler_at(scale):
    return GradScaler("cpu", init_scale=scale, growth_interval=1000)


@pytest.fixture(params=[False, True], ids=["foreach", "fused"])
def setting(request):
    model, _ = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=request.param)
    return model, optimizer


@pytest.mark.parametrize("policy", ["raise", "warn", "skip"])
def test_inf_gradients_while_the_scale_is_searched_are_no_alarm(setting, policy):
    model, optimizer = setting
    scaler = scaler_at(2.0**16)
    with OverflowGuard(model, optimizer, policy) as guard:
        for i, batch in enumerate(batches(6)):
            scaled_step(model, optimizer, scaler, batch, INF if i < 3 else None)
            assert guard.last_step_skipped == (i < 3)
    assert guard.last_report is None
    assert guard.num_skipped == 0
    assert guard.step == 6
    assert scaler.get_scale() == 2.0**13


def test_the_same_weights_with_and_without(setting):
    results = []
    for guarded in (False, True):
        model, _ = make()
        is_fused = setting[1].defaults["fused"]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=is_fused)
        scaler = scaler_at(2.0**16)
        guard = OverflowGuard(model, optimizer, "skip") if guarded else None
        for i, batch in enumerate(batches(6)):
            scaled_step(model, optimizer, scaler, batch, INF if i in (0, 3) else None)
        results.append([state_of(model, optimizer), scaler.get_scale()])
        if guard is not None:
            guard.remove()
    assert_same(*results)


def test_a_bad_forward_is_an_alarm_even_where_the_scaler_skips(setting):
    model, optimizer = setting
    scaler = scaler_at(2.0**10)
    with OverflowGuard(model, optimizer, "raise") as guard:
        scaled_step(model, optimizer, scaler, batches(1)[0])
        with plant(model.blocks[1], NAN), pytest.raises(NonFiniteError) as raised:
            scaled_step(model, optimizer, scaler, batches(2)[1])
    report = raised.value.report
    assert report.verdict.origin.maker == "blocks.1"
    assert report.skipped_by == "GradScaler"
    assert guard.num_skipped == 0


def test_no_step_is_skipped_twice(setting):
    model, optimizer = setting
    scaler = scaler_at(2.0**10)
    with OverflowGuard(model, optimizer, "skip") as guard:
        with plant(model.blocks[1], NAN):
            scaled_step(model, optimizer, scaler, batches(1)[0])
        assert guard.last_step_skipped
        before = model.head.weight.detach().clone()
        scaled_step(model, optimizer, scaler, batches(2)[1])
        assert not guard.last_step_skipped
        assert not before.equal(model.head.weight)


def test_a_scale_that_is_down_to_1_is_an_alarm(setting):
    model, optimizer = setting
    scaler = scaler_at(2.0)
    data = batches(3)
    with OverflowGuard(model, optimizer, "raise") as guard:
        scaled_step(model, optimizer, scaler, data[0], INF)
        assert guard.last_report is None
        with pytest.raises(NonFiniteError, match=r"gradient `head\.weight`"):
            scaled_step(model, optimizer, scaler, data[1], INF)


def test_gradients_that_turn_bad_after_they_were_unscaled_are_an_alarm(setting):
    model, optimizer = setting
    scaler = scaler_at(2.0**4)
    x, y = batches(1)[0]
    before = model.head.weight.detach().clone()
    with OverflowGuard(model, optimizer, "skip") as guard:
        scaler.scale(model(x, y=y)["loss"]).backward()
        scaler.unscale_(optimizer)
        model.head.weight.grad[0, 0] = NAN
        scaler.step(optimizer)
        scaler.update()
    assert guard.num_skipped == 1
    assert before.equal(model.head.weight)


@pytest.mark.parametrize("sync", ["step", "lagged"])
def test_gradients_that_reach_no_weight_are_the_scalers_business_too(setting, sync):
    model, optimizer = setting
    scaler = scaler_at(2.0**4)
    model.aside = torch.nn.Identity()
    x, y = batches(1)[0]
    with OverflowGuard(model, optimizer, "skip", sync=sync, _defer=True) as guard:
        before = model.head.weight.detach().clone()
        with plant(model.aside, INF, backward=True):
            aside = model.aside(torch.ones(2, requires_grad=True) * 2)
            loss = model(x, y=y)["loss"] + aside.sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        guard.check()
    assert guard.last_report is None
    assert not before.equal(model.head.weight)


def test_a_disabled_scaler_is_none(model, optimizer):
    scaler = GradScaler("cpu", enabled=False)
    with OverflowGuard(model, optimizer, "raise"), pytest.raises(NonFiniteError):
        scaled_step(model, optimizer, scaler, batches(1)[0], INF)


def test_the_scalers_class_is_given_back(model, optimizer):
    for listener in list(scaler_hook._listeners):  # of tests that failed, say
        scaler_hook.stop_listening(listener)
    before = GradScaler.step
    first, second = OverflowGuard(model, optimizer), OverflowGuard(model, optimizer)
    assert GradScaler.step is not before
    first.remove()
    assert GradScaler.step is not before
    second.remove()
    assert GradScaler.step is before


class Wrapper:
    """Has an optimizer as its `optimizer`, and is what the scaler is given."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.calls = 0

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.calls += 1
        self.optimizer.step()


def test_a_wrapper_that_the_scaler_steps():
    model, inner = make()
    optimizer = Wrapper(inner)
    scaler = scaler_at(2.0**8)
    with OverflowGuard(model, optimizer, "skip") as guard:
        for i, batch in enumerate(batches(4)):
            with plant(model.blocks[1], NAN) if i == 2 else torch.enable_grad():
                scaled_step(model, optimizer, scaler, batch, INF if i == 1 else None)
            assert guard.last_step_skipped == (i in (1, 2))
        assert guard.last_report.step == 2
        assert (guard.step, optimizer.calls) == (4, 2)
