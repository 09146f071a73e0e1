"""Spikes of the loss and of gradients: found, told, skipped; none in healthy runs."""

import json
import math
import random

import pytest
import torch
import torch.distributed as dist
from assembled import Assembled
from guarding import assert_same, make, state_of
from ranks import on_ranks
from torch import nn

import overflow_fast
from overflow_fast import OverflowGuard
from overflow_fast.guard.monitors.spikes import Level
from overflow_fast.monitors import Saturation, Spikes

STEPS = 1500


def noisy(generator, sigma):
    return math.exp(generator.gauss(0, sigma))


HEALTHY = {
    "a steep fall": lambda i, r: (8 * math.exp(-i / 30) + 1) * noisy(r, 0.1),
    "a long fall": lambda i, r: 10 * (i + 1) ** -0.3 * noisy(r, 0.05),
    "a warmup that grows": lambda i, r: 0.01 * min(i + 1, 400) * noisy(r, 0.3),
    "growth by a factor": lambda i, r: 1e-3 * math.exp(i / 100) * noisy(r, 0.2),
    "a plateau": lambda i, r: 2.0,
    "a plateau of few values": lambda i, r: 2.0 + r.choice((0.0, 0.0, 0.0, 0.2)),
    "zeros": lambda i, r: 0.0,
    "a hinge": lambda i, r: max(0.0, r.gauss(-1, 1)),
    "noise": lambda i, r: noisy(r, 1.0),
    "bursts": lambda i, r: noisy(r, 0.1) * (3 if r.random() < 0.1 else 1),
    "heavy tails": lambda i, r: noisy(r, 0.3) * r.paretovariate(4),
    "restarts of the rate": lambda i, r: 1 + 0.7 * (i % 300 < 40) + 0.05 * r.random(),
    "no finite value": lambda i, r: math.nan if i % 2 else math.inf,
}


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("seed", range(3))
def test_healthy_runs_have_no_spikes(name, seed):
    level, generator = Level(), random.Random(seed)
    found = [i for i in range(STEPS) if level.add(HEALTHY[name](i, generator))]
    assert found == []


@pytest.mark.parametrize("name", ["a steep fall", "a long fall", "a plateau"])
def test_a_spike_is_found_with_its_median(name):
    level, generator = Level(), random.Random(0)
    for i in range(400):
        level.add(HEALTHY[name](i, generator))
    usual = HEALTHY[name](400, random.Random(1))
    median, score = level.add(5 * usual)
    assert median == pytest.approx(usual, rel=0.5) and score > 8
    assert level.add(usual) is None


def test_the_level_is_that_of_the_last_200_steps():
    level = Level()
    for value in [1.0] * 200 + [1.5] * 101 + [2.0] * 201:
        assert level.add(value) is None
    assert level.add(3.5) is None  # 1.75 of the median
    assert level.add(4.0) == (2.0, pytest.approx(math.log(2) / 0.08))


def test_what_stays_is_the_new_level():
    level = Level()
    for _ in range(150):
        level.add(1.0)
    assert [bool(level.add(4.0)) for _ in range(80)] == [True] * 3 + [False] * 77
    for _ in range(100):
        level.add(4.0)
    assert level.add(40.0) is not None


# Under a guard.


class Model(Assembled):
    def forward(self, x, weight):
        return (self.body(self.norm(x)) ** 2).mean() * weight + 1


def trained(num, spike_at, after=lambda guard, model: None, **arguments):
    """A run whose loss is 50 times as large in one step."""
    torch.manual_seed(0)
    model = Model(body=nn.Linear(4, 1), norm=nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    states = []
    with OverflowGuard(model, optimizer, **arguments) as guard:
        for i in range(num):
            states.append(state_of(model))
            weight = 1000.0 if i == spike_at else 1.0
            model(torch.randn(8, 4) + 1, weight).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(state_of(model))
    return guard, states


def test_a_spike_is_told_and_marked_and_changes_nothing(tmp_path, caplog, as_kept):
    log, record = tmp_path / "g.jsonl", tmp_path / "run.ofr"
    guard, states = trained(115, 105, log=log, record=record)
    as_kept(" ".join(caplog.text.replace("[overflow_fast]", "").split()))
    assert not torch.equal(
        states[105]["model"]["body.weight"], states[106]["model"]["body.weight"]
    )
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    spikes = [line for line in lines if line["kind"] == "spike"]
    assert {(s["step"], s["what"], s["action"]) for s in spikes} == {
        (105, "loss", None),
        (105, "largest gradient", None),
    }
    steps = overflow_fast.read_record(record).steps
    assert {s.first: s.action for s in steps if s.action} == {105: "spike"}
    assert guard.metrics()["spikes_total"] == 1
    assert guard.last_report is None and guard.num_skipped == 0
    page = guard.to_html(tmp_path / "run.html").read_text()
    assert "spike" in page


def test_a_spike_is_skipped_with_its_buffers(tmp_path, caplog, as_kept):
    record = tmp_path / "run.ofr"
    guard, states = trained(
        115, 105, monitors=[Spikes(action="skip")], on_overflow="warn", record=record
    )
    assert_same(states[105], states[106])
    assert guard.num_skipped == 1
    as_kept(caplog.messages)
    step = overflow_fast.read_record(record).steps[105]
    assert (step.action, step.num_skipped) == ("spike", 1)


def test_a_lagged_guard_says_that_it_looks_for_no_spikes(caplog, as_kept):
    caplog.set_level("INFO")
    guard, _ = trained(115, 105, sync="lagged")
    assert guard.coverage().ignores_spikes
    as_kept(caplog.messages)
    silent, _ = trained(3, 1, sync="lagged", monitors=[Saturation()])
    assert not silent.coverage().ignores_spikes
    assert not trained(3, 1)[0].coverage().ignores_spikes


def test_no_spike_is_looked_for_without_being_asked(caplog):
    guard, _ = trained(115, 105, monitors=[Saturation()])
    assert "spike" not in caplog.text and guard.metrics()["spikes_total"] == 0


def test_a_recorded_norm_stands_for_the_gradients(caplog):
    model, optimizer = make()
    with OverflowGuard(model, optimizer) as guard:
        for i in range(115):
            out = model(torch.randn(4, 8), y=torch.randn(4, 1))
            out["loss"].backward()
            guard.record(grad_norm=torch.tensor(1e3 if i == 110 else 1.0))
            optimizer.step()
            optimizer.zero_grad()
    assert "grad norm 1000" in caplog.text
    assert "largest gradient" not in caplog.text


def test_a_gradient_is_no_loss_where_a_model_returns_none(caplog):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with OverflowGuard(model, optimizer):
        for i in range(110):
            factor = 1000.0 if i == 105 else 1.0
            (model(torch.ones(8, 4)).mean() * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "largest gradient" in caplog.text and "loss" not in caplog.text


def _skip_on_ranks():
    spike_at = 105 if dist.get_rank() == 1 else None
    guard, states = trained(
        108, spike_at, monitors=[Spikes(action="skip")], process_group=dist.group.WORLD
    )
    kept = all(
        torch.equal(states[105]["model"][name], states[106]["model"][name])
        for name in states[105]["model"]
    )
    return guard.num_skipped, kept


def test_ranks_skip_together_what_one_has_seen():
    assert on_ranks(2, _skip_on_ranks) == [(1, True), (1, True)]
