"""How much room is left, the warning before it is gone, underflow, and metrics."""

import logging
import math

import numpy as np
import pytest
import torch
from assembled import Assembled
from guarding import INF, batches, flat, make, plant, train, train_step
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.monitors import Headroom, Underflow
from overflow_fast.options import Schedule


class Growing(nn.Module):
    """Returns a constant that somebody sets, in the dtype of its input."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.value = 1.0

    def forward(self, x):
        return x * 0 + self.value + 0 * self.scale.to(x.dtype)


def grown(values, dtype=torch.float16, **options):
    """A guard under which a module has returned these values, a step for each."""
    model = nn.Sequential(Growing())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = OverflowGuard(model, optimizer, watch=["activations"], **options)
    for value in values:
        model[0].value = value
        model(torch.ones(2, dtype=dtype)).float().sum().backward()
        optimizer.step()
    return guard


@pytest.mark.parametrize("nearest", ["a", "b"])
def test_of_several_models_the_least_headroom_is_reported(nearest):
    models = {name: nn.Sequential(Growing()) for name in "ab"}
    models[nearest][0].value = 1e30
    with OverflowGuard(models, on_overflow="warn") as guard:
        for model in models.values():
            model(torch.ones(2))
        guard.record(loss=torch.tensor(INF))
        report = guard.check()
    assert report.least_headroom.where == f"output of {nearest}.0"
    assert report.least_headroom.abs_max == pytest.approx(1e30)


def row_of(guard, where):
    (row,) = [row for row in guard.headroom().rows if row.where == where]
    return row


@pytest.mark.parametrize("options", [{}, {"_defer": True}], ids=["cpu", "deferred"])
def test_each_entry_has_its_course(options):
    guard = grown([1.0, 2.0, 4.0, 8.0, 16.0], **options)
    row = row_of(guard, "output of 0")
    assert (row.abs_max, row.highest, row.limit, row.dtype) == (
        16,
        16,
        65504,
        "float16",
    )
    assert row.recent == [1, 2, 4, 8, 16]
    assert row.bits == math.log2(65504 / 16)
    assert row.trend == pytest.approx(1.0)
    assert row.steps_left == pytest.approx(row.bits)


def test_the_highest_stays_and_the_last_does_not():
    guard = grown([1.0, 64.0, 2.0])
    row = row_of(guard, "output of 0")
    assert (row.abs_max, row.highest) == (2, 64)
    assert row.float16_bits == math.log2(65504 / 64)
    assert row.trend == 0  # of three steps there is none
    assert row.steps_left == INF


def test_only_the_last_steps_make_the_trend():
    row = row_of(grown([2.0**10] * 3 + [2.0**i for i in range(16)]), "output of 0")
    assert len(row.recent) == 16
    assert row.trend == pytest.approx(1.0)


def test_microbatches_are_one_step():
    model = nn.Sequential(Growing())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = OverflowGuard(model, optimizer)
    for value in (4.0, 16.0, 2.0):
        model[0].value = value
        model(torch.ones(2)).sum().backward()
    optimizer.step()
    assert row_of(guard, "output of 0").recent == [16.0]


def test_several_optimizers_make_one_step(model):
    optimizers = [
        torch.optim.SGD(part.parameters(), lr=0.01)
        for part in (model.blocks, model.head)
    ]
    with OverflowGuard(model, optimizers, monitors=[Headroom(bits=200.0)]) as guard:
        for x, y in batches(3):
            model(x, y=y)["loss"].backward()
            for optimizer in optimizers:
                optimizer.step()
        assert len(row_of(guard, "output of head").recent) == 3
        assert len(row_of(guard, "gradient of head.weight").recent) == 3


def test_a_course_begins_anew_in_another_dtype():
    model = nn.Sequential(Growing())
    with OverflowGuard(model) as guard:
        for dtype in (torch.float32, torch.float16):
            model[0].value = 2.0 if dtype == torch.float16 else 1e6
            model(torch.ones(2, dtype=dtype))
            guard.check()
        row = row_of(guard, "output of 0")
    assert (row.dtype, row.highest, row.recent) == ("float16", 2.0, [2.0])


def test_could_it_run_in_float16(as_kept):
    table = grown([60000.0], torch.float32).headroom()
    assert "All magnitudes so far would fit float16." in str(table)
    table = grown([70000.0, 1.0], torch.float32).headroom()
    as_kept(table)
    as_kept(grown([1.0]).headroom())


def test_what_has_overflowed_fits_nothing(as_kept):
    model = nn.Sequential(nn.Linear(8, 2).half())
    model[0].weight.data.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with OverflowGuard(model, optimizer, "skip") as guard:
        bits = []
        for value in (1.0, 6e4, 1.0):
            x = torch.full((2, 8), value, dtype=torch.float16)
            (model(x).float().sum() * 1e-6).backward()
            optimizer.step()
            bits.append(guard.metrics()["headroom_bits"])
        table = guard.headroom()
    assert guard.num_skipped == 1
    assert bits[0] > 10 and bits[1] == 0 and bits[2] > 10
    assert row_of(guard, "output of 0").float16_bits == -INF
    as_kept(table)


def test_a_nan_is_not_said_to_overflow_in_float16(as_kept):
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "skip") as guard:
        for factor in (1.0, math.nan):
            guard.run(lambda f=factor: model(torch.ones(2, 8)).mean() * f).backward()
            optimizer.step()
    as_kept(str(guard.headroom()))


def test_before_the_first_step_there_is_nothing(as_kept):
    as_kept(OverflowGuard(nn.Linear(1, 1)).headroom())


def test_the_table_has_everything_that_was_made(model, optimizer):
    with OverflowGuard(model, optimizer) as guard:
        train(model, optimizer, batches(2))
        names = {row.where for row in guard.headroom().rows}
        bits = [row.bits for row in guard.headroom().rows]
    assert {
        "output of blocks.0.fc1",
        "weight of head",
        "gradient of blocks.1.fc2.bias",
        "grad_output of blocks.2",
        "norm.running_var",
    } <= names
    assert bits == sorted(bits)


# The warning.


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, "overflow_fast")
    return lambda: [flat(text) for text in caplog.messages]


@pytest.mark.parametrize("options", [{}, {"_defer": True}], ids=["cpu", "deferred"])
@pytest.mark.explains
def test_an_overflow_is_announced(caplog, options, as_kept):
    values = [1250.0 * 2**i for i in range(6)]
    grown(values, monitors=[Headroom(bits=2.0)], **options)
    first, second = caplog.messages
    as_kept(first)
    assert all(len(line) <= 100 for line in first.splitlines())
    assert "Step 5" in second  # when half of it is gone


def test_float32_is_not_told_to_go_to_float32(said, as_kept):
    grown([3e38], monitors=[Headroom(bits=1.0)], dtype=torch.float32)
    as_kept(said()[0])


@pytest.mark.explains
def test_lagged_stats_may_be_of_the_step_before(said, as_kept):
    grown([1.0, 50000.0], monitors=[Headroom(bits=1.0)], sync="lagged")
    as_kept(said()[0])


def test_it_is_said_once(said):
    grown([50000.0] * 10, monitors=[Headroom(bits=1.0)])
    assert len(said()) == 1
    assert "fewer" not in said()[0]  # nothing moves
    assert "of the model" not in said()[0]  # which returns what `0` has returned


@pytest.mark.parametrize(
    "value, monitors",
    [(32000.0, [Headroom()]), (65504.0, [Headroom()]), (0.0, [Headroom()]), (6e4, ())],
)
def test_nothing_is_said_in_vain(said, value, monitors):
    grown([value], monitors=monitors)
    assert said() == []


def test_gradients_under_a_scaler_are_left_out(model, optimizer, said):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**125)
    with OverflowGuard(model, optimizer, monitors=[Headroom(bits=8.0)]) as guard:
        x, y = batches(1)[0]
        scaler.scale(model(x, y=y)["loss"]).backward()
        scaler.step(optimizer)
        scaler.update()
        assert guard.metrics()["headroom_bits"] < 8
    assert said() == []


def test_a_bad_step_is_not_called_finite(model, optimizer, said, as_kept):
    with OverflowGuard(model, optimizer, "skip", monitors=[Headroom(bits=200.0)]):
        with plant(model.head, INF):
            train_step(model, optimizer, batches(1)[0])
    as_kept([each for each in said() if "Detected" not in each])


@pytest.mark.slow
def test_more_places_than_have_a_course(said):
    class Wide(nn.Module):
        def forward(self, x):
            return {f"{id(self)} {i}": x for i in range(35_000)}

    model = nn.Sequential(nn.Identity())
    wide = [Wide(), Wide()]
    model.extend(wide)
    model.forward = lambda x: [each(x) for each in wide] and x
    with OverflowGuard(
        model, monitors=[Headroom(bits=1.0)], watch=["activations"]
    ) as guard:
        for value in (1.0, 3e38):
            model(torch.full((1,), value))
            guard.check()
    assert len(guard.headroom().rows) <= 2**16
    assert any("3e+38" in each for each in said())


def test_many_are_said_in_one_message(model, optimizer, said):
    with OverflowGuard(model, optimizer, monitors=[Headroom(bits=127.9)]):
        train_step(model, optimizer, batches(1)[0])
    (line,) = said()
    assert "more: see `guard.headroom()`." in line


# Underflow.


def counted(tensor):
    bits = tensor.view(
        {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    )
    magnitudes = bits.numpy().astype(np.int64) & (2 ** (8 * tensor.itemsize - 1) - 1)
    tiny = torch.tensor(torch.finfo(tensor.dtype).tiny, dtype=tensor.dtype)
    limit = int(tiny.view(bits.dtype))
    zeros = int((magnitudes == 0).sum())
    return zeros, int((magnitudes < limit).sum()) - zeros


def underflow_of(value):
    """What is counted of a value that a module returns."""
    model = nn.Sequential(Out(value=value))
    with OverflowGuard(model, monitors=[Underflow(every=1)]) as guard:
        model(torch.ones(1))
        guard.check()
        assert guard.coverage().failures == 0
        found = [r.underflow for r in guard.headroom().rows if r.where == "output of 0"]
    return found[0] if found else None


class Out(Assembled):
    def forward(self, x):
        return self.value.t()  # no copy: strided


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("flush", [False, True], ids=["", "flushed"])
def test_zeros_and_subnormals_are_counted_exactly(dtype, flush):
    tiny = torch.finfo(dtype).tiny
    torch.manual_seed(0)
    values = torch.randn(40, 7, dtype=torch.float64) * tiny
    values[::3] = 0.0
    values[1::5] = -0.0
    values = values.to(dtype)
    torch.set_flush_denormal(flush)
    try:
        underflow = underflow_of(values)
    finally:
        torch.set_flush_denormal(False)
    assert underflow.numel == 280
    assert (underflow.zeros, underflow.subnormals) == counted(values)
    assert underflow.subnormals > 50


@pytest.mark.parametrize(
    "dtype, smallest, steps",
    [
        (torch.float8_e4m3fn, 2.0**-9, 8),
        (torch.float8_e5m2, 2.0**-16, 4),
        (torch.float8_e4m3fnuz, 2.0**-10, 8),
        (torch.float8_e5m2fnuz, 2.0**-17, 4),
    ],
    ids=str,
)
def test_eight_bit_formats_are_counted_too(dtype, smallest, steps):
    values = torch.arange(16).float() * smallest
    underflow = underflow_of((values * -1).to(dtype))
    assert (underflow.zeros, underflow.subnormals) == (1, steps - 1)


@pytest.mark.parametrize(
    "value", [torch.ones(3, dtype=torch.int32), torch.ones(3) + 1j, torch.ones(0)]
)
def test_what_cannot_underflow_is_not_counted(value):
    assert underflow_of(value) is None


def test_it_is_counted_when_it_is_due(model, optimizer):
    told = []
    recorder = None
    with OverflowGuard(
        model,
        optimizer,
        monitors=[Underflow(every=3)],
        metrics=lambda step, values: told.append(step),
    ) as guard:
        recorder = guard._parts.watches[0].recorder
        due = []
        for batch in batches(5):
            due.append(recorder.counts_underflow)
            train_step(model, optimizer, batch)
        assert due == [True, False, False, True, False]
        assert "gradient_zeros" in guard.metrics()
        assert "zeros" in str(guard.headroom())
    assert told == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("schedule", [Schedule(10, warmup=5), Schedule(7)], ids=str)
def test_watched_steps_count(model, optimizer, schedule):
    seen = []
    with OverflowGuard(
        model,
        optimizer,
        monitors=[Underflow(every=2)],
        metrics=lambda step, values: seen.append("gradient_zeros" in values),
        schedule=schedule,
    ):
        train(model, optimizer, batches(30))
    assert seen and all(seen)


def test_checks_count(model):
    with OverflowGuard(model, monitors=[Underflow(every=2)]) as guard:
        recorder = guard._parts.watches[0].recorder
        due = []
        for x, y in batches(4):
            due.append(recorder.counts_underflow)
            model(x, y=y)["loss"].backward()
            guard.check()
    assert due == [True, False, True, False]


def test_counting_changes_nothing():
    losses = []
    for monitors in ((), [Underflow(every=1)]):
        model, optimizer = make()
        with OverflowGuard(model, optimizer, monitors=monitors):
            losses.append(train(model, optimizer, batches(3)))
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


def test_gradients_that_are_gone_show_in_the_metrics(model, optimizer):
    with OverflowGuard(model, optimizer, monitors=[Underflow(every=1)]) as guard:
        train_step(model, optimizer, batches(1)[0])
        assert guard.metrics()["gradient_zeros"] < 0.1
        x, y = batches(1)[0]
        (model(x, y=y)["loss"] * 1e-43).backward()
        optimizer.step()
        metrics = guard.metrics()
    assert metrics["gradient_zeros"] + metrics["gradient_subnormals"] > 0.99


# Metrics.


def test_metrics_are_told_after_each_step(model, optimizer):
    told = {}
    exporter = told.__setitem__
    with OverflowGuard(model, optimizer, "skip", metrics=exporter) as guard:
        train_step(model, optimizer, batches(1)[0])
        with plant(model.head, INF):
            train_step(model, optimizer, batches(1)[0])
        assert guard.metrics() == told[1]
    assert list(told) == [0, 1]
    assert told[0]["bad_steps_total"] == 0
    assert told[1]["bad_steps_total"] == told[1]["skipped_steps_total"] == 1
    assert told[1]["steps_total"] == told[1]["steps_watched_total"] == 2
    assert 0 < told[1]["guard_share"] < 1
    assert told[0]["headroom_bits"] > 100


def test_an_exporter_that_fails_stops_nothing(model, optimizer, said, as_kept):
    told = []

    def fails(step, values):
        raise RuntimeError("no route")

    exporters = [fails, lambda step, values: told.append(step)]
    with OverflowGuard(model, optimizer, metrics=exporters) as guard:
        train(model, optimizer, batches(3))
        assert guard.step == 3
    assert told == [0, 1, 2]
    as_kept(said())


def test_wrong_exporters_are_reported(as_kept):
    def call(metrics):
        OverflowGuard(nn.Linear(1, 1), metrics=metrics)

    as_kept.errors(call, [nn.Linear, "runs", [print, 3]])


@pytest.mark.explains
def test_a_bad_step_says_what_came_nearest(as_kept):
    model = nn.Sequential(Growing(), nn.Tanh())
    with OverflowGuard(model) as guard:
        model[0].value = 3e38
        with pytest.raises(NonFiniteError) as raised:
            model(torch.ones(1, 2))
            guard.record(loss=torch.tensor(INF))
            guard.check()
        as_kept(raised.value.report.sentences())
