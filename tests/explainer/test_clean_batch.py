"""The cost of a remedy is measured with the batch of the last clean step."""

import functools
import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.guard.kept_calls import kept_call

NAN = float("nan")
CLEAN, BAD = 10.0, 100.0  # exp of twice the first is finite, and above exp(20)


@dataclass
class Batch:
    x: torch.Tensor
    scale: float = 1.0


class Exp(nn.Module):
    """Grows by exp, and is given a batch in one of several forms."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x=None, batch=None):
        if batch is not None:
            x = batch["x"] if isinstance(batch, dict) else batch.x
        return {"loss": (self.weight * x).exp().mean()}


def batches(num=4):
    """Clean batches of growing values, and one in which a sample overflows."""
    torch.manual_seed(0)
    found = [torch.rand(4, 3) + CLEAN + i for i in range(num)]
    bad = found[-1].clone()
    bad[1] *= BAD
    return [*found, bad]


def loss_of(model, x):
    return model(x)["loss"]


def ran(step, model=None, data=None, after=None, **options):
    """The remedies of a run whose last step is bad, and the weights of that step."""
    model = Exp() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    guard = OverflowGuard(model, optimizer, explain=True, **options)
    with pytest.raises(NonFiniteError) as error:
        for number, x in enumerate(batches() if data is None else data):
            optimizer.zero_grad()
            step(guard, model, x, number)
            optimizer.step()
            if after is not None:
                after(x)
    guard.remove()
    return [e for e in error.value.report.explanation.remedies if not e.is_of_data]


def by_keyword(guard, model, x, number):
    model(x=x)["loss"].backward()


def by_dict(guard, model, x, number):
    model(batch={"x": x, "name": "a"})["loss"].backward()


def by_dataclass(guard, model, x, number):
    model(batch=Batch(x))["loss"].backward()


def by_function(guard, model, x, number):
    guard.run(lambda: loss_of(model, x)).backward()


def by_default(guard, model, x, number):
    guard.run(lambda x=x, times=1.0: loss_of(model, x) * times).backward()


def scaled_loss_of(model, x, by):
    return loss_of(model, x) * by / 3  # once in the last clean step, of number 3


def by_number(guard, model, x, number):
    guard.run(functools.partial(scaled_loss_of, model, x, by=number)).backward()


def by_partial(guard, model, x, number):
    guard.run(functools.partial(loss_of, model, x)).backward()


def accumulated(guard, model, x, number):
    for part in x.chunk(2):
        (model(part)["loss"] / 2).backward()


def accumulated_functions(guard, model, x, number):
    for part in x.chunk(2):
        guard.run(lambda part=part: model(part)["loss"] / 2).backward()


WHOLE = (
    by_keyword,
    by_dict,
    by_dataclass,
    by_function,
    by_default,
    by_partial,
    by_number,
)
BEFORE = (2.0 * batches()[-2]).exp()
AFTER = (2.0 * batches()[-2]).clamp(max=20).exp()


def measured(remedies):
    """The remedy that was measured with the last clean batch, and no sample of this."""
    (found,) = [each for each in remedies if each.elsewhere is not None]
    assert found.elsewhere.left_out is None
    return found


@pytest.mark.parametrize("step", WHOLE)
def test_a_remedy_says_what_it_makes_of_the_last_clean_batch(step):
    found = measured(ran(step))
    before, after = BEFORE.mean().item(), AFTER.mean().item()
    assert found.elsewhere.losses == pytest.approx((before, after), rel=1e-5)


@pytest.mark.parametrize("step", [accumulated, accumulated_functions])
def test_of_several_batches_of_a_step_it_is_the_last(step):
    found = measured(ran(step))
    share = 1 if step is accumulated else 2  # is within the function there
    before, after = (each[2:].mean().item() / share for each in (BEFORE, AFTER))
    assert found.elsewhere.losses == pytest.approx((before, after), rel=1e-5)


def test_the_outcome_says_whether_the_last_clean_batch_changes(as_kept):
    small = [each / 8 for each in batches()[:-1]]
    found, *_ = ran(by_keyword, data=[*small, batches()[-1]])
    assert found.elsewhere.left_out is None and found.elsewhere.moved == 0
    as_kept(f"{measured(ran(by_keyword)).outcome}\n{found.outcome}")


def test_gradients_are_compared_where_the_loss_stays(as_kept):
    class Constant(Exp):
        def forward(self, x):
            grown = super().forward(x)["loss"]
            return {"loss": grown - grown.detach()}

    remedies = ran(by_keyword, model=Constant())
    found = next(each for each in remedies if each.elsewhere is not None)
    assert found.elsewhere.losses == (0.0, 0.0)
    as_kept(found.outcome)


# Where the batch is not known, nothing is said of it.


def is_measured(*args, **options):
    remedies = ran(*args, **options)
    assert any(each.keeps_running for each in remedies)
    return any(
        each.elsewhere is not None and each.elsewhere.left_out is None
        for each in remedies
    )


def test_a_batch_that_was_written_to_since_is_not_used():
    buffer = torch.empty(4, 3)

    def in_place(guard, model, x, number):
        model(buffer.copy_(x))["loss"].backward()

    assert not is_measured(in_place)
    assert not is_measured(by_keyword, after=lambda x: x.numpy().fill(0.0))


@pytest.mark.slow
def test_it_is_not_used_where_the_function_reads_other_values_by_now():
    def by_number(guard, model, x, number):
        guard.run(lambda: loss_of(model, x) * (number + 1)).backward()

    def by_default(guard, model, x, number):
        guard.run(lambda n=number + 1: loss_of(model, x) * n).backward()

    def by_list(guard, model, x, number):
        sizes = [number]
        guard.run(lambda: loss_of(model, x) * len(sizes)).backward()

    def by_part(guard, model, x, number):
        def scaled(model, x, sizes):
            return loss_of(model, x) * len(sizes)

        guard.run(functools.partial(scaled, model, x, sizes=[number])).backward()

    for step in (by_number, by_default, by_list, by_part):
        assert not is_measured(step)


def test_it_is_not_used_for_another_function():
    def by_turns(guard, model, x, number):
        if number % 2:
            guard.run(lambda: loss_of(model, x)).backward()
        else:
            guard.run(lambda: loss_of(model, x) * 1).backward()

    assert not is_measured(by_turns)


def test_a_method_may_read_what_it_likes():
    class Trainer:
        def step(self, x):
            return loss_of(self.model, x)

    trainer = Trainer()

    def by_method(guard, model, x, number):
        trainer.model = model
        guard.run(functools.partial(trainer.step, x)).backward()

    assert not is_measured(by_method)


def test_no_first_step_has_one():
    assert not is_measured(by_keyword, data=batches()[-1:])


def test_the_other_samples_are_measured_where_the_clean_batch_fails_by_now():
    data = batches()

    def grown(guard, model, x, number):
        if number == len(data) - 1:
            with torch.no_grad():
                model.weight.mul_(20)  # with which each batch fails
        model(x)["loss"].backward()

    assert not is_measured(grown, data=data)


# How long it is kept.


def guarded(explain=True):
    model = Exp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    return OverflowGuard(model, optimizer, explain=explain), model, optimizer


def stepped(guard, model, optimizer, step=by_keyword, x=None):
    """Makes a clean step; returns its batch, held weakly."""
    x = torch.rand(4, 3) if x is None else x
    step(guard, model, x, 0)
    optimizer.step()
    optimizer.zero_grad()
    return weakref.ref(x)


@pytest.mark.parametrize("step", WHOLE)
def test_one_batch_is_kept_until_the_next_clean_step_or_the_guard_is_off(step):
    guard, model, optimizer = guarded()
    first = stepped(guard, model, optimizer, step)
    assert first() is not None
    second = stepped(guard, model, optimizer, step)
    assert first() is None and second() is not None
    guard.disable()
    assert second() is None
    guard.enable()
    third = stepped(guard, model, optimizer, step)
    guard.remove()
    assert third() is None


def test_none_is_kept_where_nothing_is_run_again():
    guard, model, optimizer = guarded(explain=False)
    assert stepped(guard, model, optimizer)() is None
    guard.remove()


def test_a_large_batch_is_let_go(monkeypatch):
    monkeypatch.setattr(kept_call, "_MAX_HELD_BYTES", 4 * 12 - 1)
    guard, model, optimizer = guarded()
    assert stepped(guard, model, optimizer)() is None
    guard.remove()


def test_a_batch_with_a_graph_is_let_go():
    guard, model, optimizer = guarded()
    x = torch.rand(4, 3, requires_grad=True) * 2
    kept = stepped(guard, model, optimizer, x=x)
    del x
    assert kept() is None
    guard.remove()


@pytest.mark.parametrize("step", WHOLE)
def test_no_model_is_kept_alive(step):
    guard, model, optimizer = guarded()
    stepped(guard, model, optimizer, step)
    alive = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert alive() is None
    guard.remove()


def test_the_batch_of_a_skipped_step_is_none_of_them():
    found = []
    model = Exp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)

    def skips(verdict):
        found.append(verdict)
        return "skip"

    *clean, bad = batches()
    with OverflowGuard(model, optimizer, skips, explain=True):
        for x in (*clean, bad, bad * 2):
            optimizer.zero_grad()
            by_keyword(None, model, x, 0)
            optimizer.step()
    assert len(found) == 2
    for report in found:
        assert measured([e for e in report.explanation.remedies if not e.is_of_data])


def mean_beside_nan(model, rewards):
    """Leaves nan out, and divides by 0 where one value is left."""
    count = (~rewards.isnan()).sum()
    spread = (rewards - rewards.nanmean()) * (count / (count - 1))
    return (model.weight.sum() * torch.where(rewards.isnan(), 0.0, spread)).mean()


@pytest.mark.parametrize("is_usual", [True, False])
def test_nan_that_the_last_clean_batch_had_is_no_origin(is_usual):
    model = Exp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    first = NAN if is_usual else 0.0
    batches = [torch.tensor(each) for each in ([1, first, 2.0], [1, NAN, NAN])]
    with OverflowGuard(model, optimizer, explain=True) as guard:
        with pytest.raises(NonFiniteError) as error:
            for rewards in batches:
                guard.run(lambda x=rewards: mean_beside_nan(model, x)).backward()
                optimizer.step()
    found = error.value.report.explanation
    told = [each for each in found.evidence if "in the last clean step, too" in each]
    assert found.cause == ("undefined" if is_usual else "bad data")
    assert told == ["`x` held non-finite values in the last clean step, too"] * is_usual
