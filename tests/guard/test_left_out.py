"""Steps that are not judged: none of them in silence."""

import pytest
import torch
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.guard.step_clock import LeftOut
from overflow_fast.options import Schedule

NAN = float("nan")


def make(policy, **arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    arguments = {"explain": False, "max_consecutive_skips": 1000, **arguments}
    return model, optimizer, OverflowGuard(model, optimizer, policy, **arguments)


def step(model, optimizer, is_bad=False):
    optimizer.zero_grad()
    (model(torch.ones(3, 4)).mean() * (NAN if is_bad else 1.0)).backward()
    optimizer.step()


def is_finite(model):
    return all(bool(p.isfinite().all()) for p in model.parameters())


LEFT_OUT = {"every": (Schedule(10), 10), "warmup": (Schedule(warmup=6), 6)}


@pytest.mark.parametrize(
    "by, policy",
    [*((by, "skip") for by in LEFT_OUT), ("every", "raise"), ("every", "warn")],
)
def test_a_weight_is_told_to_have_turned_bad_in_steps_that_were_left_out(
    by, policy, as_kept
):
    schedule, last = LEFT_OUT[by]
    model, optimizer, guard = make(policy, schedule=schedule)
    with guard:
        for number in range(last):
            step(model, optimizer, is_bad=number == last - 1)
        assert not is_finite(model)
        if policy == "warn":
            step(model, optimizer)
        else:
            with pytest.raises(NonFiniteError):
                step(model, optimizer)
        report = guard.last_report
    assert report.verdict.first.kind == "weight"
    as_kept(report.notes)


def test_a_bad_step_of_finite_state_does_not_tell_of_steps_before(as_kept):
    model, optimizer, guard = make("skip", schedule=3)
    with guard:
        for number in range(4):
            step(model, optimizer, is_bad=number == 3)
    assert guard.num_skipped == 1
    assert guard.last_report.notes == []
    as_kept(guard.last_report.not_covered)


@pytest.mark.parametrize("arguments", [{}, {"sync": "lagged", "_defer": True}])
def test_one_step_that_was_left_out_is_one(arguments, as_kept):
    model, optimizer, guard = make("warn", schedule=2, **arguments)
    with guard:
        for number in range(4):
            step(model, optimizer, is_bad=number == 1)
    as_kept(guard.last_report.notes[0])


def test_a_check_looks_at_the_state_in_a_step_that_is_left_out(as_kept):
    model, optimizer, guard = make("warn", schedule=Schedule(warmup=5))
    with guard:
        step(model, optimizer)
        assert guard.check() is None
        step(model, optimizer, is_bad=True)
        report = guard.check()
    assert report.verdict.first.kind == "weight"
    as_kept(report.notes)


def test_steps_that_are_left_out_are_put_into_words(as_kept):
    found = LeftOut()
    for argument in ("warmup", "every", "every"):
        found = found.and_step(argument)
    assert found == LeftOut(3, "every", total=3)
    as_kept(found)
    found = found.and_step("").and_step("every")
    assert found == LeftOut(1, "every", total=4, follows_check=True)


@pytest.mark.parametrize("explain", [False, "auto"])
@pytest.mark.explains
def test_a_function_has_its_loss_recorded_with_and_without_explanations(explain):
    model, optimizer, guard = make("skip", explain=explain)
    with guard:
        guard.run(lambda: model(torch.ones(3, 4)).mean()).backward()
        optimizer.step()
        assert guard.coverage().has_seen_loss
