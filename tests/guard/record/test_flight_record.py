"""What a guard writes to a flight record, and what `read_record()` makes of it."""

import logging
import math
import os
import sys

import pytest
import torch
from guarding import INF, NAN, batches, make, plant, train, train_step
from processes import context
from torch import nn
from torch.amp.grad_scaler import GradScaler

from overflow_fast import NonFiniteError, OverflowGuard, read_record
from overflow_fast.monitors import Underflow

LAGGED = {"sync": "lagged", "_defer": True}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "run.ofr"


def recorded(path, steps=3, faults=(), policy="skip", **arguments):
    """A run with an inf planted in the head in some steps, and its record."""
    model, optimizer = make()
    with OverflowGuard(model, optimizer, policy, record=path, **arguments):
        for i, batch in enumerate(batches(steps)):
            with plant(model.head, INF) if i in faults else torch.enable_grad():
                train_step(model, optimizer, batch)
    return read_record(path)


def number(record, column, step, **entry):
    """The number of the one entry with these attributes."""
    (index,) = [
        i
        for i, each in enumerate(record.entries)
        if all(getattr(each, name) == value for name, value in entry.items())
    ]
    return record.values[column][step, index].item()


# What is in it.


@pytest.mark.parametrize("options", [{}, {"_defer": True}, LAGGED])
def test_every_output_gradient_and_weight_has_its_extremes(path, options):
    model, optimizer = make()
    expected = []

    def note(name, kind, tensor):
        values = tensor.detach().abs().double()
        extremes = values.min().item(), values.max().item()
        expected.append((guard.step, name, kind, *extremes))

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.GELU):

            def hook(module, args, output, name=name):
                note(name, "output", output)
                output.register_hook(lambda g: note(name, "grad_output", g))

            module.register_forward_hook(hook)
    with OverflowGuard(model, optimizer, "warn", record=path, **options) as guard:
        for x, y in batches(3):
            model(x, y=y)["loss"].backward()
            for name, parameter in model.named_parameters():
                module, _, label = name.rpartition(".")
                note((module, label), "gradient", parameter.grad)
                note((module, label), "weight", parameter)
            optimizer.step()
            optimizer.zero_grad()
    record = read_record(path)
    assert [step.first for step in record.steps] == [0, 1, 2]
    assert len(expected) == 3 * (2 * 10 + 2 * 16)
    for step, name, kind, low, high in expected:
        module, label = name if isinstance(name, tuple) else (name, "output")
        label = "grad_output" if kind == "grad_output" else label
        entry = {"module": module, "kind": kind, "label": label}
        assert number(record, "abs_min", step, **entry) == low
        assert number(record, "abs_max", step, **entry) == high


def test_entries_say_what_they_are_in_order_of_execution(path):
    record = recorded(path)
    outputs = [each for each in record.entries if each.kind == "output"]
    names = [each.module for each in outputs]
    assert names[:4] == ["blocks.0.fc1", "blocks.0.act", "blocks.0.fc2", "blocks.0"]
    assert names.index("head") < names.index("")
    first = outputs[0]
    assert (first.class_name, first.label, first.dtype) == (
        "Linear",
        "output",
        "float32",
    )
    assert (first.numel, first.model) == (64, 0)
    assert first.limit == torch.finfo(torch.float32).max
    kinds = {each.kind for each in record.entries}
    assert kinds == {"output", "grad_output", "weight", "gradient", "buffer"}
    assert len(set(record.entries)) == len(record.entries)


def test_steps_say_what_they_took_and_what_was_done(path):
    record = recorded(path, faults=[1])
    assert [step.action for step in record.steps] == [None, "skip", None]
    assert [step.num_skipped for step in record.steps] == [0, 1, 0]
    assert [step.learning_rate for step in record.steps] == [1e-2] * 3
    assert all(0 < step.guard_seconds < step.seconds for step in record.steps)
    assert record.steps[1].loss == INF
    assert math.isfinite(record.steps[2].loss)
    assert record.steps[0].loss_scale is record.steps[0].grad_norm is None


def test_the_run_says_where_it_ran(path):
    run = recorded(path).run
    assert (run["rank"], run["world_size"], run["pid"]) == (0, 1, os.getpid())
    assert run["torch"] == torch.__version__
    assert (run["devices"], run["models"]) == (["cpu"], ["Net"])


@pytest.mark.parametrize("options", [{}, LAGGED])
def test_a_bad_step_has_its_counts(path, options):
    record = recorded(path, faults=[1], policy="warn", explain=False, **options)
    assert [step.action for step in record.steps][:2] == [None, "warn"]
    counts = [
        number(record, "num_inf", step, module="head", kind="output")
        for step in range(2)
    ]
    assert counts[0] == 0 < counts[1]
    bad = record.is_nonfinite()
    assert not bad[0].any() and bad[1].any()
    assert (record.headroom_bits()[1] == -INF).equal(bad[1])
    assert number(record, "abs_max", 1, module="head", kind="output") == INF


def test_a_nan_is_told_from_what_was_not_looked_at(model, optimizer, path):
    guard = OverflowGuard(model, optimizer, "warn", record=path, explain=False)
    with guard:
        for i, batch in enumerate(batches(2)):
            with plant(model.head, NAN) if i == 0 else torch.enable_grad():
                train_step(model, optimizer, batch)
        guard.record(extra=torch.ones(2))
        train_step(model, optimizer, batches(1)[0])
    record = read_record(path)
    assert math.isnan(number(record, "abs_max", 0, module="head", kind="output"))
    assert number(record, "num_nan", 0, module="head", kind="output") > 0
    assert math.isnan(number(record, "abs_max", 0, label="extra"))
    assert number(record, "num_nan", 0, label="extra") == -1
    assert number(record, "abs_max", 2, label="extra") == 1


def test_a_step_that_raises_is_there_when_it_raises(model, optimizer, path):
    guard = OverflowGuard(model, optimizer, record=path, explain=False)
    train_step(model, optimizer, batches(1)[0])
    with plant(model.head, INF), pytest.raises(NonFiniteError):
        train_step(model, optimizer, batches(1)[0])
    assert [step.action for step in read_record(path).steps] == [None, "raise"]
    guard.remove()


def test_a_lagged_run_that_ends_badly_has_its_last_step(path):
    with pytest.raises(NonFiniteError):
        recorded(path, faults=[2], policy="raise", explain=False, **LAGGED)
    record = read_record(path)
    assert [step.action for step in record.steps] == [None, None, "raise"]


def test_a_lagged_line_waits_for_the_verdict_of_its_step(model, optimizer, path):
    guard = OverflowGuard(model, optimizer, record=path, sync="lagged")
    train(model, optimizer, batches(2))
    assert len(read_record(path)) == 1
    guard.remove()
    assert len(read_record(path)) == 2


def test_zeros_are_there_in_steps_that_count_them(model, optimizer, path):
    with torch.no_grad():
        model.blocks[0].fc1.weight[0] = 0
    optimizer.param_groups[0]["lr"] = 0.0
    with OverflowGuard(model, optimizer, record=path, monitors=[Underflow(every=2)]):
        train(model, optimizer, batches(3))
    record = read_record(path)
    counts = record.values["num_zero"]
    weight = {"module": "blocks.0.fc1", "kind": "weight", "label": "weight"}
    found = [number(record, "num_zero", step, **weight) for step in range(3)]
    assert found == [8, -1, 8]
    assert (counts[1] == -1).all()
    assert recorded(path.with_name("other.ofr")).values["num_zero"] is None
    saturated = record.values["num_saturated"]
    assert (saturated[0] == 0).any() and (saturated[1] == -1).all()


def test_a_scale_and_what_is_recorded_are_numbers_of_the_step(model, optimizer, path):
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    with OverflowGuard(model, optimizer, "skip", record=path) as guard:
        for i, (x, y) in enumerate(batches(3)):
            scaler.scale(model(x, y=y)["loss"]).backward()
            if i == 1:
                next(model.parameters()).grad.fill_(INF)
            guard.record(grad_norm=torch.tensor(2.0 + i))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    steps = read_record(path).steps
    assert [step.loss_scale for step in steps] == [8, 16, 8]
    assert [step.num_skipped for step in steps] == [0, 1, 0]
    assert [step.action for step in steps] == [None] * 3
    assert [step.grad_norm for step in steps] == [2, 3, 4]


def test_a_loss_that_is_recorded_is_the_loss(model, optimizer, path):
    with OverflowGuard(model, optimizer, record=path) as guard:
        x, y = batches(1)[0]
        loss = 3 * model(x, y=y)["loss"]
        guard.record(loss=loss)
        loss.backward()
        optimizer.step()
    assert read_record(path).steps[0].loss == loss.item()


def test_only_watched_steps_have_a_line(path):
    record = recorded(path, steps=6, schedule=2)
    assert [step.first for step in record.steps] == [0, 2, 4]


def test_a_loop_that_checks_has_a_line_for_each_check(model, path):
    with OverflowGuard(model, None, "warn", record=path, explain=False) as guard:
        for i, (x, y) in enumerate(batches(3)):
            guard.step = i
            with plant(model.head, INF) if i == 1 else torch.enable_grad():
                model(x, y=y)
            guard.check()
    record = read_record(path)
    assert [step.first for step in record.steps] == [0, 1, 2]
    assert [step.action for step in record.steps] == [None, "warn", None]
    assert record.steps[0].guard_share is None


def test_several_models_have_their_entries_side_by_side(path):
    models = {name: nn.Linear(2, 2) for name in ("gen", "dis")}
    optimizer = torch.optim.SGD([p for m in models.values() for p in m.parameters()])
    with OverflowGuard(models, optimizer, record=path):
        for factor in (1.0, 2.0):
            out = models["gen"](torch.ones(1, 2)) + models["dis"](
                factor * torch.ones(1, 2)
            )
            out.sum().backward()
            optimizer.step()
    record = read_record(path)
    assert {(each.model, each.module) for each in record.entries} == {
        (0, "gen"),
        (1, "dis"),
    }
    high = record.values["abs_max"]
    assert not high.isnan().any()


def test_recomputed_forwards_share_the_entries_of_the_forward(model, optimizer, path):
    block = model.blocks[0]
    forward = block.forward
    block.forward = lambda x: torch.utils.checkpoint.checkpoint(
        forward, x, use_reentrant=False
    )
    with OverflowGuard(model, optimizer, record=path):
        train(model, optimizer, batches(2))
    record = read_record(path)
    assert number(record, "abs_max", 0, module="blocks.0.fc1", kind="output") > 0


def test_numbers_beyond_float32_are_exact(path):
    model = nn.Linear(1, 1, bias=False).double()
    model.weight.data.fill_(1e300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with OverflowGuard(model, optimizer, record=path):
        model(torch.full((1, 1), 1 / 3, dtype=torch.float64)).sum().backward()
        optimizer.step()
    record = read_record(path)
    assert number(record, "abs_max", 0, kind="weight") == 1e300
    assert number(record, "abs_max", 0, kind="gradient") == 1 / 3


# What it must not do.


def test_training_is_bit_identical_with_a_record(path):
    model, optimizer = make()
    with OverflowGuard(model, optimizer):
        losses = train(model, optimizer, batches(3))
    other, optimizer = make()
    with OverflowGuard(other, optimizer, record=path):
        assert train(other, optimizer, batches(3)) == losses
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert one.equal(two)


def test_a_second_run_has_a_file_of_its_own_and_says_so(path, caplog, as_kept):
    recorded(path)
    before = path.read_bytes()
    with caplog.at_level(logging.WARNING, "overflow_fast"):
        recorded(path, steps=1)
    assert path.read_bytes() == before
    other = path.with_name("run.2.ofr")
    as_kept(caplog.messages)
    assert len(read_record(other)) == 1


def test_a_folder_that_cannot_be_made_stops_nothing(tmp_path, caplog, as_kept):
    (tmp_path / "file").touch()
    model, optimizer = make()
    with OverflowGuard(model, optimizer, record=tmp_path / "file" / "run.ofr"):
        losses = train(model, optimizer, batches(3))
    assert len(losses) == 3
    as_kept(caplog.messages)


def _train_here_and_in_a_fork(path):
    model, optimizer = make()
    guard = OverflowGuard(model, optimizer, record=path)
    train(model, optimizer, batches(2))
    pid = os.fork()
    train(model, optimizer, batches(1))
    if pid == 0:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    guard.remove()


def test_a_process_that_forks_and_trains_has_a_file_of_its_own(path):
    # In a new process: one that ever ran a reentrant backward cannot fork and train.
    process = context().Process(target=_train_here_and_in_a_fork, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert [step.first for step in read_record(path).steps] == [0, 1, 2]
    other = read_record(path.with_name("run.2.ofr"))
    assert [step.first for step in other.steps] == [2]
    assert other.entries == read_record(path).entries


# As a table.


def test_iterating_yields_what_was_looked_at(path):
    record = recorded(path, steps=2, faults=[1])
    rows = list(record)
    assert len(rows) == 2 * len(record.entries)
    row = next(r for r in rows if r["module"] == "head" and r["step"] == 1)
    assert row["last_step"] == 1
    assert (row["num_saturated"], row["num_zero"]) == (None, None)
    (bad,) = [
        r
        for r in rows
        if r["module"] == "head" and r["kind"] == "output" and r["num_inf"]
    ]
    assert bad["step"] == 1


def test_a_dataframe_has_the_same_rows(path):
    pytest.importorskip("pandas")
    record = recorded(path, steps=2)
    frame = record.to_dataframe()
    assert len(frame) == len(list(record))
    assert set(frame["kind"]) == {each.kind for each in record.entries}
    assert frame.query("kind == 'output' and module == 'head'")["abs_max"].tolist() == [
        number(record, "abs_max", step, module="head", kind="output")
        for step in range(2)
    ]


def test_without_pandas_a_sentence_says_what_to_install(path, monkeypatch, as_kept):
    record = recorded(path, steps=1)
    monkeypatch.setitem(sys.modules, "pandas", None)
    as_kept.error(ImportError, record.to_dataframe)
