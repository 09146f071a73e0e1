"""Monitors: the protocol, a user's own, and what a guard makes of what they say."""

import json
import math

import torch
import torch.distributed as dist
from guarding import assert_same, batches, make, state_of, train, train_step
from ranks import on_ranks
from torch import nn

from overflow_fast import OverflowGuard, read_record
from overflow_fast.monitors import Monitor, Notice, Spikes


class DeadUnits(Monitor):
    """Tells of layers in which ever more units get no gradient."""

    def __init__(self, share=0.5):
        self.share, self.told = share, {}

    def look(self, step):
        for name, layer in step.models[""].named_modules():
            if isinstance(layer, nn.Linear) and layer.weight.grad is not None:
                dead = (layer.weight.grad == 0).all(dim=1).float().mean().item()
                if dead >= self.share and dead > self.told.get(name, 0.0):
                    self.told[name] = dead
                    yield f"{dead:.0%} of the units of {name} get no gradient"


class Noted(Monitor):
    """Notes all calls."""

    def __init__(self, calls):
        self.calls = calls

    def start(self, guarded):
        return self

    def begin_step(self, step):
        self.calls.append(("begin", step))

    def look(self, step):
        self.calls.append(("look", step.number))
        return ()

    def end_step(self, step):
        self.calls.append(("end", step))

    def stop(self):
        self.calls.append("stop")

    def metrics(self):
        return {"noted": len(self.calls)}


class Skips(Monitor):
    """Skips a step."""

    def __init__(self, number, may_skip=True):
        self.number, self.may_skip = number, may_skip

    def look(self, step):
        if step.number == self.number:
            return [Notice("a step to leave out", action="skip")]
        return []


def messages(caplog):
    texts = (each.replace("[overflow_fast]", "") for each in caplog.messages)
    return [" ".join(each.split()) for each in texts]


def dying():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.0)


def step_with(model, optimizer, num_dead):
    with torch.no_grad():
        model[0].bias[:num_dead] = -100.0
        model[0].bias[num_dead:] = 100.0
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_a_monitor_of_ones_own_warns(tmp_path, caplog, as_kept):
    model, optimizer = dying()
    log = tmp_path / "guard.jsonl"
    with OverflowGuard(model, optimizer, log=log, monitors=[DeadUnits()]) as guard:
        for num_dead in (0, 4, 4, 6):
            step_with(model, optimizer, num_dead)
    first, second = messages(caplog)
    as_kept(first)
    as_kept(second)
    assert guard.num_skipped == 0 and guard.metrics()["spikes_total"] == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    notices = [line for line in lines if line["kind"] == "notice"]
    assert [(n["step"], n["action"], n["monitor"]) for n in notices] == [
        (1, None, "DeadUnits"),
        (3, None, "DeadUnits"),
    ]
    as_kept(notices[0]["text"])


def test_each_guard_has_a_copy_of_its_own(caplog):
    monitor = DeadUnits()
    for _ in range(2):
        model, optimizer = dying()
        with OverflowGuard(model, optimizer, monitors=[monitor]):
            step_with(model, optimizer, 4)
    assert len(messages(caplog)) == 2 and monitor.told == {}


def test_when_a_monitor_is_called(model, optimizer):
    calls = []
    with OverflowGuard(model, optimizer, monitors=[Noted(calls)]) as guard:
        train(model, optimizer, batches(2))
        assert guard.metrics()["noted"] == len(calls) == 7
    assert calls == [
        *[("begin", 0), ("look", 0), ("end", 0)],
        *[("begin", 1), ("look", 1), ("end", 1)],
        *[("begin", 2), "stop"],
    ]


def test_bad_steps_are_not_looked_at(model, optimizer):
    calls = []
    with OverflowGuard(model, optimizer, "skip", monitors=[Noted(calls)]):
        (x, y), *_ = batches(1)
        train_step(model, optimizer, (x * math.nan, y))
    assert ("look", 0) not in calls and ("end", 0) in calls


def test_a_lagged_guard_does_not_look(model, optimizer):
    calls = []
    monitors = [Noted(calls)]
    with OverflowGuard(model, optimizer, sync="lagged", monitors=monitors):
        train(model, optimizer, batches(2))
    assert not [each for each in calls if each[0] == "look"]
    assert ("end", 1) in calls


class Numbers(Monitor):
    """Keeps what a step tells."""

    def __init__(self, seen):
        self.seen = seen

    def start(self, guarded):
        return self

    def look(self, step):
        self.seen.append((step.loss, step.grad_norm, step.magnitudes, step.optimizer))
        return ()


def test_a_step_tells_loss_norm_and_magnitudes(model, optimizer):
    seen = []
    with OverflowGuard(model, optimizer, monitors=[Numbers(seen)]) as guard:
        for number, (x, y) in enumerate(batches(3)):
            loss = model(x, y=y)["loss"]
            loss.backward()
            guard.record(grad_norm=torch.tensor(2.5 + number))
            optimizer.step()
            got, norm, magnitudes, stepped = seen[-1]
            assert got == loss.item() and norm == 2.5 + number
            assert stepped is optimizer
            assert all(each >= 0 for each in magnitudes.values())
            assert any("output of head" in name for name in magnitudes)


def test_a_monitor_may_skip(model, optimizer, tmp_path, caplog, as_kept):
    states, path = [], tmp_path / "run.ofr"
    with OverflowGuard(
        model, optimizer, "warn", monitors=[Skips(1)], record=path
    ) as guard:
        for batch in batches(3):
            states.append(state_of(model, optimizer))
            train_step(model, optimizer, batch)
    states.append(state_of(model, optimizer))
    assert guard.num_skipped == 1 and guard.last_report is None
    assert_same(states[1], states[2])
    (text,) = messages(caplog)
    as_kept(text)
    actions = [step.action for step in read_record(path).steps]
    assert "spike" not in actions


def test_who_may_not_skip_warns(model, optimizer, caplog, as_kept):
    with OverflowGuard(model, optimizer, monitors=[Skips(1, may_skip=False)]) as guard:
        train(model, optimizer, batches(3))
    assert guard.num_skipped == 0
    as_kept(messages(caplog)[0])
    options = {"sync": "lagged", "monitors": [Skips(1)]}
    as_kept.error(ValueError, OverflowGuard, model, optimizer, **options)


def _skip_on_ranks():
    torch.manual_seed(0)
    model, optimizer = make()
    monitor = Skips(1 if dist.get_rank() == 1 else -1)
    group = dist.group.WORLD
    with OverflowGuard(
        model, optimizer, monitors=[monitor], process_group=group
    ) as guard:
        train(model, optimizer, batches(3))
    return guard.num_skipped, guard.metrics()["spikes_total"]


def test_all_ranks_skip_what_a_monitor_of_one_skips():
    assert on_ranks(2, _skip_on_ranks) == [(1, 0), (1, 0)]


class Broken(Monitor):
    """Fails in every method."""

    def start(self, guarded):
        return self

    def fail(self, *_):
        raise RuntimeError("broken monitor")

    begin_step = look = end_step = stop = metrics = fail


def test_errors_of_a_monitor_do_not_reach_the_program(caplog, as_kept):
    calls = []
    model, optimizer = make()
    monitors = [Broken(), Noted(calls), Spikes()]
    with OverflowGuard(model, optimizer, monitors=monitors) as guard:
        train(model, optimizer, batches(2))
        assert guard.metrics()["noted"] == len(calls)
        assert guard.coverage().failures > 0
    assert ("look", 1) in calls and calls[-1] == "stop"
    assert "broken monitor" in caplog.text
    as_kept(caplog.messages)


def test_what_is_written_next_to_a_monitor_is_checked(model, optimizer, as_kept):
    class Twice(DeadUnits):
        pass

    OverflowGuard(model, optimizer, monitors=[DeadUnits(), Twice()]).remove()
    twice = [DeadUnits(), DeadUnits()]
    as_kept.error(ValueError, OverflowGuard, model, optimizer, monitors=twice)
