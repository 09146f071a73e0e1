"""What a bad step leaves on disk."""

import logging
import sys

import pytest
import torch
from containers import CONTAINERS, FEW
from evidence_folders import bad_steps, step_folders, strict
from guarding import INF, NAN, assert_same, batches, make, plant, train, train_step
from safetensors.torch import load_file

from overflow_fast import OverflowGuard


def test_a_bad_step_leaves_its_report_tensors_and_batch(tmp_path):
    guard, data = bad_steps(tmp_path / "bad")
    folder = step_folders(tmp_path / "bad")["step-00000000"]
    assert guard.last_report.evidence == str(folder)
    assert (folder / "report.txt").read_text() == f"{guard.last_report}\n"
    report = strict(folder / "report.json")
    assert report["schema"] == 1 and report["kind"] == "report"
    assert report["verdict"]["maker"] == "blocks.1.fc2"
    marker = strict(folder / "overflow_fast.json")
    assert marker == {
        "schema": 1,
        "kind": "evidence",
        "run": folder.parent.name,
        "step": 0,
    }
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


def test_a_bad_gradient_is_kept(model, optimizer, tmp_path):
    with OverflowGuard(model, optimizer, "skip", evidence=tmp_path):
        with plant(model.blocks[1].fc1, NAN, backward=True):
            train_step(model, optimizer, batches(1)[0])
    tensors = load_file(step_folders(tmp_path)["step-00000000"] / "tensors.safetensors")
    assert tensors["['call']"].isnan().sum() == 1
    assert tensors["['call']"].shape == (4, 16)


def test_old_evidence_is_removed(tmp_path):
    bad_steps(tmp_path, count=5, keep=2)
    assert list(step_folders(tmp_path)) == ["step-00000003", "step-00000004"]
    (run,) = (tmp_path / "overflow_fast").iterdir()
    assert len(list(run.iterdir())) == 2


def test_what_is_too_large_is_left_out_and_listed(tmp_path, as_kept):
    bad_steps(tmp_path, mib=300 / 2**20)
    folder = step_folders(tmp_path)["step-00000000"]
    tensors = load_file(folder / "tensors.safetensors")
    assert sum(tensor.nbytes for tensor in tensors.values()) < 300
    as_kept((folder / "left_out.txt").read_text())


def test_what_is_no_plain_tensor_is_listed(tmp_path, as_kept):
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
    folder = step_folders(tmp_path)["step-00000000"]
    as_kept((folder / "left_out.txt").read_text().splitlines())


def test_a_clean_run_leaves_nothing(model, optimizer, tmp_path):
    with OverflowGuard(model, optimizer, evidence=tmp_path / "bad") as guard:
        train(model, optimizer, batches(3))
        assert guard._parts.watches[0].inputs.batches == {}
    assert not (tmp_path / "bad").exists()


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path, caplog, as_kept):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING, "overflow_fast"):
        guard, _ = bad_steps(blocked)
    assert guard.num_skipped == 1
    as_kept([each for each in caplog.messages if "evidence" in each])
    assert guard.last_report.evidence is None
    assert "Evidence" not in str(guard.last_report)


def test_without_safetensors_it_is_reported_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    model, optimizer = make()
    with pytest.raises(ImportError, match="pip install safetensors"):
        OverflowGuard(model, optimizer, evidence=tmp_path)


@pytest.mark.parametrize("kind", FEW)
def test_the_batch_is_kept_by_its_place_in_a_container(kind, tmp_path):
    container, layer, x = (
        CONTAINERS[kind],
        torch.nn.Linear(4, 1),
        torch.full((2, 4), NAN),
    )

    class Taking(torch.nn.Module):
        def forward(self, batch):
            return layer(container.get(batch)).sum()

    model = Taking()
    model.layer = layer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "skip", evidence=tmp_path, explain=False):
        model(container.make(x)).backward()
        optimizer.step()
    (path,) = tmp_path.rglob("batch.safetensors")
    assert_same(load_file(path), {f"[0][0]{container.path}": x})
