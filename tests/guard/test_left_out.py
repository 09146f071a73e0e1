"""Steps that are not judged: within a budget few, and none of them in silence."""

import json

import pytest
import torch
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard, Schedule, Spikes
from overflow_fast.guard.step import LeftOut, WatchSchedule
from overflow_fast.guard.watching.judged_tensors import ScanLevel

NAN = float("nan")


@pytest.fixture
def costs(monkeypatch):
    """What checks cost, in steps; what is measured counts nowhere."""
    found = {ScanLevel.OFF: 0.0, ScanLevel.GRADIENTS: 0.0, ScanLevel.ALL: 0.0}
    note = WatchSchedule.note

    def planned(self, step, level, guard_seconds, step_seconds):
        note(self, step, level, found[level], 1.0 + found[level])

    monkeypatch.setattr(WatchSchedule, "note", planned)

    def set_costs(gradients, everything):
        found.update({ScanLevel.GRADIENTS: gradients, ScanLevel.ALL: everything})

    return set_costs


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


POLICIES = ["skip", "raise", lambda report: "skip"]


@pytest.mark.parametrize("gradients", [0.002, 0.0099])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_that_fit_a_budget_are_judged_in_each_step(policy, gradients, costs):
    costs(gradients, everything=0.5)
    model, optimizer, guard = make(policy, schedule=Schedule(budget=0.01))
    num_stopped = 0
    with guard:
        for number in range(90):
            try:
                step(model, optimizer, is_bad=number >= 30)
            except NonFiniteError:
                num_stopped += 1
        coverage = guard.coverage()
    assert guard.num_skipped + num_stopped == 60
    assert is_finite(model)
    assert coverage.steps_watched == coverage.steps == 90


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_that_a_budget_leaves_out_are_told_once_and_counted(
    policy, costs, caplog, tmp_path, as_kept
):
    costs(gradients=0.1, everything=0.5)
    log = tmp_path / "guard.jsonl"
    model, optimizer, guard = make(policy, schedule=Schedule(budget=0.01), log=log)
    with guard, pytest.raises(NonFiniteError) as error:
        for number in range(200):
            step(model, optimizer, is_bad=25 <= number < 30)
    messages = [record.getMessage() for record in caplog.records]
    (warning,) = (message for message in messages if "too small" in message)
    as_kept(warning)

    # Full checks in steps 0 and 2, gradients in 1, 3, 4, 24 and 44.
    report, coverage = error.value.report, guard.coverage()
    assert report.step == (44 if policy == "raise" else 45)
    as_kept(report.notes)
    kinds = {"raise": "gradient"}
    assert report.verdict.first.kind == kinds.get(policy, "weight")

    assert coverage.steps - coverage.steps_watched == 38
    metrics = guard.metrics()
    assert metrics["steps_total"] - metrics["steps_watched_total"] == 38
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[-1]["num_left_out"] == 38


def test_a_policy_that_only_warns_is_not_told(costs, caplog):
    costs(gradients=0.1, everything=0.5)
    model, optimizer, guard = make("warn", schedule=Schedule(budget=0.01))
    with guard:
        for _ in range(30):
            step(model, optimizer)
    assert "too small" not in caplog.text


def test_where_gradients_are_not_watched_a_step_is_judged_or_left_out(
    costs, caplog, as_kept
):
    """Without them, a step between two full ones would look at nothing."""
    costs(gradients=0.0, everything=0.1)
    model, optimizer, guard = make(
        "skip", schedule=Schedule(budget=0.01), watch=("activations", "loss")
    )
    with guard:
        for _ in range(40):
            step(model, optimizer)
        coverage = guard.coverage()
    assert coverage.steps_watched == 4
    as_kept(caplog.messages)


def test_a_first_check_that_is_slow_decides_nothing():
    """Caches are cold, kernels are compiled: the first checks take longer."""
    schedule = WatchSchedule(budget=0.01)
    seen = []
    for number in range(60):
        level = schedule.level(number)
        is_first = seen.count(level) == 0
        cost = {ScanLevel.ALL: 0.05, ScanLevel.GRADIENTS: 0.005}.get(level, 0.0)
        schedule.note(number, level, 20 * cost if is_first else cost, 1.0 + cost)
        seen.append(level)
    assert ScanLevel.OFF not in seen


@pytest.mark.parametrize("value, count", [(torch.tensor(NAN), 1), (torch.ones(3), 0)])
def test_a_recorded_number_counts_where_gradients_alone_are_checked(
    value, count, costs
):
    costs(gradients=0.002, everything=0.5)
    model, optimizer, guard = make("skip", schedule=Schedule(budget=0.01))
    with guard:
        for _ in range(5):
            step(model, optimizer)
        assert guard._parts.clock.level is ScanLevel.GRADIENTS
        guard.record(loss=value)
        step(model, optimizer)
    assert guard.num_skipped == count


def test_a_spike_is_one_of_the_step_that_has_it(costs):
    """Numbers of the last full step are no numbers of the steps behind it."""
    costs(gradients=0.002, everything=0.5)
    model, optimizer, guard = make(
        "warn", schedule=Schedule(budget=0.01), monitors=[Spikes("skip")]
    )
    with guard:
        for number in range(150):
            guard._parts.clock.set_level(
                ScanLevel.ALL if number <= 120 else ScanLevel.GRADIENTS
            )
            guard.record(loss=torch.tensor(1e6 if number == 120 else 1.0))
            step(model, optimizer)
    assert guard.num_skipped == 1


# Steps that other arguments leave out.

LEFT_OUT = {
    "every": (Schedule(10), 10),
    "warmup": (Schedule(warmup=6), 6),
    "ranges": (Schedule(ranges=[(0, 2), (8, 20)]), 8),
    "every` and `schedule.ranges": (Schedule(4, ranges=[(0, 1), (12, 20)]), 12),
}


@pytest.mark.parametrize("policy", ["skip", "raise", "warn"])
@pytest.mark.parametrize("by", LEFT_OUT)
def test_a_weight_is_told_to_have_turned_bad_in_steps_that_were_left_out(
    by, policy, caplog, as_kept
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
    as_kept(report.notes, report.not_covered)
    assert "too small" not in caplog.text  # that was asked for


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
    found, off = LeftOut(), ScanLevel.OFF
    for argument in ("warmup", "every", "every"):
        found = found.and_step(off, argument)
    assert found == LeftOut(3, ("warmup", "every"), total=3)
    as_kept(found)
    assert found.and_step(ScanLevel.GRADIENTS, "") == found
    found = found.and_step(ScanLevel.ALL, "").and_step(off, "every")
    assert found == LeftOut(1, ("every",), total=4, follows_check=True)


@pytest.mark.parametrize("explain", [False, "auto"])
@pytest.mark.explains
def test_a_function_has_its_loss_recorded_with_and_without_explanations(explain):
    model, optimizer, guard = make("skip", explain=explain)
    with guard:
        loss = guard.run(lambda: model(torch.ones(3, 4)).mean())
        loss.backward()
        optimizer.step()
        assert guard.coverage().has_seen_loss
