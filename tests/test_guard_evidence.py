"""What a bad step leaves on disk."""

import json
import logging
import sys

import pytest
import torch
from guarding import INF, NAN, assert_same, batches, make, plant, train, train_step
from safetensors.torch import load_file

from overflow_fast import OverflowGuard
from overflow_fast.guard import evidence


def bad_steps(folder, count=1, spoil=None, **arguments):
    model, optimizer = make()
    data = batches(count)
    with OverflowGuard(model, optimizer, "skip", evidence=folder, **arguments) as guard:
        for batch in data:
            with plant(model.blocks[1].fc2, INF):
                train_step(model, optimizer, batch)
    return guard, data


def test_a_bad_step_leaves_its_report_tensors_and_batch(tmp_path):
    guard, data = bad_steps(tmp_path / "bad")
    folder = tmp_path / "bad" / "step-00000000"
    assert guard.last_report.evidence == str(folder)
    assert (folder / "report.txt").read_text() == f"{guard.last_report}\n"
    report = json.loads((folder / "report.json").read_text())
    assert report["verdict"]["maker"] == "blocks.1.fc2"
    tensors = load_file(folder / "tensors.safetensors")
    output = tensors["['call'][2]"]
    assert output.isinf().sum() == 1
    assert output.shape == (4, 8)
    assert tensors["['call'][0][0]"].shape == (4, 16)  # its input
    assert "['gradient of blocks.0.fc1.weight']" in tensors
    batch = load_file(folder / "batch.safetensors")
    assert_same(sorted(batch), ["[0][0]", "[1]['y']"])
    assert_same(batch["[0][0]"], data[0][0])
    assert_same(batch["[1]['y']"], data[0][1])
    assert not (folder / "left_out.txt").exists()


def test_a_bad_gradient_is_kept(tmp_path):
    model, optimizer = make()
    with OverflowGuard(model, optimizer, "skip", evidence=tmp_path):
        with plant(model.blocks[1].fc1, NAN, backward=True):
            train_step(model, optimizer, batches(1)[0])
    tensors = load_file(tmp_path / "step-00000000" / "tensors.safetensors")
    assert tensors["['call']"].isnan().sum() == 1
    assert tensors["['call']"].shape == (4, 16)


def test_old_evidence_is_removed(tmp_path):
    bad_steps(tmp_path, count=5, evidence_keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000003",
        "step-00000004",
    ]


def test_what_is_too_large_is_left_out_and_listed(tmp_path):
    bad_steps(tmp_path, evidence_mib=300 / 2**20)
    folder = tmp_path / "step-00000000"
    assert sum(t.nbytes for t in load_file(folder / "batch.safetensors").values()) < 300
    assert "bytes are too many" in (folder / "left_out.txt").read_text()


def test_what_is_no_plain_tensor_is_listed(tmp_path):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, x, indices, scale, name=None):
            return self.inner(x) * scale

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "skip", evidence=tmp_path):
        sparse = torch.eye(2).to_sparse()
        model(torch.ones(1, 2), sparse, INF, name="x").sum().backward()
        optimizer.step()
    left_out = (tmp_path / "step-00000000" / "left_out.txt").read_text().splitlines()
    assert left_out[0].startswith("batch[0][1]: its layout is torch.sparse")
    assert "batch[0][2]: inf" in left_out
    assert "batch[1]['name']: 'x'" in left_out


def test_a_clean_run_leaves_nothing(tmp_path):
    model, optimizer = make()
    with OverflowGuard(model, optimizer, evidence=tmp_path / "bad") as guard:
        train(model, optimizer, batches(3))
        assert guard._supervisor.watches[0].batches == {}
    assert not (tmp_path / "bad").exists()


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING, "overflow_fast"):
        guard, _ = bad_steps(blocked)
    assert guard.num_skipped == 1
    assert "the evidence of step 0 was not kept" in caplog.text


def test_without_safetensors_it_is_told_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    model, optimizer = make()
    with pytest.raises(ImportError, match="pip install safetensors"):
        OverflowGuard(model, optimizer, evidence=tmp_path)


# The log.


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_log_has_a_line_for_each_step(tmp_path):
    model, optimizer = make()
    path = tmp_path / "new" / "guard.jsonl"
    with OverflowGuard(model, optimizer, "skip", log=path):
        for i, batch in enumerate(batches(3)):
            with plant(model.head, INF) if i == 1 else torch.enable_grad():
                train_step(model, optimizer, batch)
    lines = lines_of(path)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [line["is_clean"] for line in lines] == [True, False, True]
    assert [line["action"] for line in lines] == [None, "skip", None]
    assert [line["num_skipped"] for line in lines] == [0, 1, 1]
    assert lines[1]["first"] == "head: output"
    assert lines[1]["maker"] == "head"
    bits = [line["headroom_bits"] for line in lines if line["is_clean"]]
    assert all(100 < each < 140 for each in bits)
    assert {line["headroom_bits"] for line in lines if not line["is_clean"]} == {0}
    assert lines[0]["headroom_at"]


def test_the_least_headroom_is_that_of_half_precision(tmp_path):
    model, _ = make()
    model.bfloat16()
    model.head.half()
    model.head.register_forward_pre_hook(lambda m, args: (args[0].half(),))
    model.head.weight.data.fill_(3e4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    path = tmp_path / "guard.jsonl"
    with OverflowGuard(model, optimizer, log=path, watch=("weights",)):
        optimizer.step()
    (line,) = lines_of(path)
    assert line["headroom_at"] == "head.weight"
    assert line["headroom_bits"] == pytest.approx(1.13, abs=0.01)  # 65504 / 30000


def test_the_log_is_rotated(tmp_path):
    model, optimizer = make()
    path = tmp_path / "guard.jsonl"
    with OverflowGuard(model, optimizer, log=path, log_mib=1000 / 2**20, log_keep=2):
        train(model, optimizer, batches(30))
    names = sorted(each.name for each in tmp_path.iterdir())
    assert names == ["guard.jsonl", "guard.jsonl.1", "guard.jsonl.2"]
    assert all(each.stat().st_size <= 1000 for each in tmp_path.iterdir())
    assert lines_of(path)[-1]["step"] == 29


def test_a_log_that_cannot_be_written_is_told_once(tmp_path, caplog, monkeypatch):
    model, optimizer = make()
    with OverflowGuard(model, optimizer, log=tmp_path / "guard.jsonl") as guard:

        def fail(*_):
            raise OSError("no space left on device")

        monkeypatch.setattr(evidence._Handler, "format", fail)
        with caplog.at_level(logging.WARNING, "overflow_fast"):
            train(model, optimizer, batches(3))
        assert guard.step == 3
    assert caplog.text.count("was lost") == 1
