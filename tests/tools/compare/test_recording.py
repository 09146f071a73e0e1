"""Recordings: what they hold, and that the program does not notice them."""

import json
import math
import threading

import pytest
import torch
from compared_models import batch, tower
from torch.utils.checkpoint import checkpoint

import overflow_fast
from overflow_fast.tools.compare import recording


def lines_of(folder, step=0):
    return [json.loads(line) for line in open(folder / f"rank-0.step-{step}.jsonl")]


def rows_of(folder, step=0):
    return lines_of(folder, step)[1:]


def names_of(rows):
    return [(row["module"], row["role"], row.get("path", "")) for row in rows]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def test_it_holds_all_of_a_step_in_the_order_of_execution(folder):
    model = tower(num_blocks=1)
    with overflow_fast.recording(folder, model):
        model(batch()).backward()
    rows = rows_of(folder)
    assert [row["order"] for row in rows] == list(range(len(rows)))
    names = names_of(rows)
    block = "blocks.0"
    expected = [
        ("embed", "parameter", "weight"),
        ("", "input", "[0]"),
        ("embed", "output", ""),
        (f"{block}.attention.qkv", "output", ""),
        (f"{block}.attention.out", "input", "[0]"),
        (f"{block}.attention", "output", ""),
        ("head", "output", ""),
        ("", "output", ""),
        ("", "output_gradient", ""),
        ("head", "output_gradient", ""),
        (f"{block}.attention.out", "input_gradient", "[0]"),
        ("embed", "output_gradient", ""),
        ("embed", "parameter_gradient", "weight"),
    ]
    places = [names.index(each) for each in expected]
    assert places == sorted(places)
    assert len(set(names)) == len(names)


def test_a_row_has_the_numbers_of_its_tensor(folder):
    model = tower()
    x = batch()
    x[0, 0, 0], x[1, 1, 1] = math.nan, -math.inf
    with overflow_fast.recording(folder, model):
        model(x)
    row = next(row for row in rows_of(folder) if row["role"] == "input")
    finite = x[x.isfinite()].double()
    assert (row["num_nan"], row["num_inf"]) == (1, 1)
    assert (row["low"], row["high"]) == (finite.min().item(), finite.max().item())
    assert row["squares"] == pytest.approx(finite.square().sum().item(), rel=1e-6)
    assert row["dtype"] == "float32" and row["shape"] == [4, 6, 8]


def test_the_same_tensor_is_kept_once(folder):
    model = tower(num_blocks=1)
    with overflow_fast.recording(folder, model):
        model(batch())
    rows = rows_of(folder)
    act = names_of(rows).index(("blocks.0.act", "input", "[0]"))
    up = names_of(rows).index(("blocks.0.up", "output", ""))
    assert rows[act]["same"] == up and "fingerprint" not in rows[act]


def test_what_is_written_in_place_is_another_tensor(folder):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(inplace=True))
    with overflow_fast.recording(folder, model):
        model(torch.randn(2, 4))
    rows = {(row["module"], row["role"]): row for row in rows_of(folder)}
    assert rows["0", "output"]["low"] < 0 <= rows["1", "output"]["low"]
    assert "same" not in rows["1", "output"]


def test_steps_are_chosen_and_gradients_are_those_of_the_optimizer(folder):
    model = tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    with overflow_fast.recording(folder, model, steps=[1]) as run:
        for _ in range(3):
            model(batch()).backward()
            norms.append(model.head.weight.grad.norm().item())
            optimizer.step()
            optimizer.zero_grad()
            run.step()
    assert [path.name for path in folder.iterdir()] == ["rank-0.step-1.jsonl"]
    rows = rows_of(folder, 1)
    final = rows[names_of(rows).index(("head", "parameter_gradient", "weight"))]
    at = names_of(rows).index(("head", "accumulated_gradient", "weight"))
    assert final["same"] == rows[at]["order"]  # as backward left it, and read once
    assert math.sqrt(rows[at]["squares"]) == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_is_recorded_once(folder, use_reentrant):
    model = tower(num_blocks=2)
    plain = tower(num_blocks=2)
    forward = model.blocks[0].forward
    model.blocks[0].forward = lambda x, scale: checkpoint(
        forward, x, use_reentrant=use_reentrant
    )
    for name, each in (("a", model), ("b", plain)):
        with overflow_fast.recording(folder / name, each):
            each(batch()).backward()
    diff = overflow_fast.compare(folder / "a", folder / "b")
    assert diff.counts()["equal"] == len(diff.rows) > 60
    # A reentrant one has a copy of its input, whose gradient is one more.
    assert len(diff.said) == use_reentrant


def test_the_program_computes_the_same_and_keeps_no_hook(folder):
    def step(model):
        loss = model(batch())
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters()), torch.rand(2)]

    expected = step(tower(dropout=0.5))
    model = tower(dropout=0.5)
    with overflow_fast.recording(folder, model):
        found = step(model)
    assert all(map(torch.equal, found, expected))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_exception_passes_through_and_is_noted(folder):
    model = tower()
    with pytest.raises(ZeroDivisionError):
        with overflow_fast.recording(folder, model):
            model(batch())
            1 / 0  # noqa: B018
    assert lines_of(folder)[0]["raised"] == "ZeroDivisionError"


def test_a_full_disk_ends_the_recording_alone(folder, monkeypatch, caplog):
    model = tower()
    monkeypatch.setattr(recording, "dumps", lambda line: 1 / 0)
    with overflow_fast.recording(folder, model):
        model(batch()).backward()
    assert "Recording to" in caplog.text and model.head.weight.grad is not None


def test_threads_may_call_the_model_at_once(folder, caplog):
    model = tower()
    with overflow_fast.recording(folder, model):
        calls = [threading.Thread(target=model, args=(batch(),)) for _ in range(4)]
        for call in calls:
            call.start()
        for call in calls:
            call.join()
    assert caplog.text == "" and lines_of(folder)[0]["failures"] == []
    assert sum(row["role"] == "output" for row in rows_of(folder)) == 4 * 28


def test_nothing_is_written_over(folder, as_kept):
    with overflow_fast.recording(folder, tower()):
        pass
    as_kept.error(FileExistsError, overflow_fast.recording, folder, tower())


def test_a_row_of_a_7b_model_is_small(folder):
    model = tower()
    with overflow_fast.recording(folder, model):
        model(batch()).backward()
    rows = rows_of(folder)
    size = (folder / "rank-0.step-0.jsonl").stat().st_size / len(rows)
    # Llama 2 7B: 291 parameters and their gradients; 32 layers of 13 modules and 4
    # more, of which each has at most two inputs, an output and two gradients.
    assert size * (2 * 291 + (32 * 13 + 4) * 5) < 10e6
