"""Nothing of the user's is removed or overwritten, and no disk stops a run."""

import os
import shutil

import pytest
import torch
from evidence_folders import bad_steps, no_file_beyond, step_folders, strict
from guarding import INF, NAN, assert_same, batches, make, plant, train_step
from safetensors.torch import load_file

from overflow_fast import OverflowGuard
from overflow_fast.options import Evidence


def files_of(folder):
    """Every file and link below a folder, and what it holds."""
    return {
        path: os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def test_checkpoints_in_the_folder_are_left_alone(tmp_path):
    for name in ("step-1000", "step-00000000", "overflow_fast/step-3", "step-x"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "model.pt").write_text("weights")
        os.utime(tmp_path / name, (1e9, 1e9))
    (tmp_path / "step-2000").symlink_to(tmp_path / "step-1000")
    before = files_of(tmp_path)
    bad_steps(tmp_path, count=4, keep=1)
    after = files_of(tmp_path)
    assert {path: after.get(path) for path in before} == before
    assert list(step_folders(tmp_path)) == ["step-00000003"]


def test_runs_share_a_folder(tmp_path):
    for _ in range(3):
        bad_steps(tmp_path, count=2, keep=1)
    runs = list((tmp_path / "overflow_fast").iterdir())
    assert len(runs) == 3
    for run in runs:  # `keep` is of each run's own steps
        (step,) = run.iterdir()
        assert strict(step / "overflow_fast.json")["run"] == run.name


def add_a_file(step):
    (step / "notes.txt").write_text("look at head")


def edit_the_report(step):
    with open(step / "report.txt", "a") as report:
        report.write("seen before in run 7\n")


def put_a_link_in(step):
    (step / "report.txt").unlink()
    (step / "report.txt").symlink_to(step / "report.json")


def write_another_marker(step):
    text = (step / "overflow_fast.json").read_text()
    (step / "overflow_fast.json").write_text(text.replace("evidence", "checkpoint"))


def remove_the_marker(step):
    (step / "overflow_fast.json").unlink()


def move_it_elsewhere(step):
    elsewhere = step.parent.parent.parent / "kept"
    step.rename(elsewhere)
    step.symlink_to(elsewhere)


def move_the_run_elsewhere(step):
    elsewhere = step.parent.parent.parent / "kept"
    step.parent.rename(elsewhere)
    step.parent.symlink_to(elsewhere)


@pytest.mark.parametrize(
    "change",
    [
        *(add_a_file, edit_the_report, put_a_link_in, write_another_marker),
        *(remove_the_marker, move_it_elsewhere, move_the_run_elsewhere),
    ],
)
def test_what_was_changed_is_not_removed(model, optimizer, tmp_path, change):
    with OverflowGuard(model, optimizer, "skip", evidence=Evidence(tmp_path, keep=1)):
        for i, batch in enumerate(batches(3)):
            with plant(model.head, INF):
                train_step(model, optimizer, batch)
            if i == 0:
                (step,) = tmp_path.glob("overflow_fast/*/step-00000000")
                change(step)
                before = files_of(tmp_path)
    after = files_of(tmp_path)
    assert {path: after.get(path) for path in before} == before
    names = [path.name for path in tmp_path.glob("overflow_fast/*/step-*")]
    assert sorted(names) == ["step-00000000", "step-00000002"]


def test_two_reports_of_one_step_are_both_kept(model, optimizer, tmp_path):
    batch = batches(1)[0]
    with OverflowGuard(model, optimizer, "warn", evidence=tmp_path) as guard:
        with plant(model.head, INF):
            with torch.no_grad():
                model(batch[0], y=batch[1])
            evaluated = guard.last_report
            train_step(model, optimizer, batch)
    found = step_folders(tmp_path)
    assert list(found) == ["step-00000000", "step-00000000.2"]
    assert evaluated.evidence == str(found["step-00000000"])
    assert guard.last_report.evidence == str(found["step-00000000.2"])
    texts = [(path / "report.txt").read_text() for path in found.values()]
    assert "without autograd" in texts[0] and "without autograd" not in texts[1]


# What cannot be kept.


def test_what_is_not_finite_comes_first_where_room_is_short(tmp_path, as_kept):
    model = torch.nn.Linear(1024, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Room for the gradient or for the batch.
    room = Evidence(tmp_path, mib=1003 / 1024)
    with OverflowGuard(model, optimizer, "warn", evidence=room):
        model(torch.randn(250, 1024)).sum().backward()
        model.weight.grad[0, 0] = NAN
        optimizer.step()
    folder = step_folders(tmp_path)["step-00000000"]
    tensors = load_file(folder / "tensors.safetensors")
    assert tensors["['gradient of weight']"].isnan().sum() == 1
    as_kept((folder / "left_out.txt").read_text())


def test_of_a_call_the_bad_output_comes_first(tmp_path):
    bad_steps(tmp_path, mib=128 / 2**20)  # just the output's
    folder = step_folders(tmp_path)["step-00000000"]
    tensors = load_file(folder / "tensors.safetensors")
    assert_same(sorted(tensors), ["['call'][2]"])


class Grumpy:
    def __repr__(self):
        raise RuntimeError("no")


def test_what_cannot_be_copied_leaves_the_rest(tmp_path, as_kept):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, x, *others):
            return self.inner(x) * INF

    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    conjugate = torch.tensor([1 + 2j]).conj()
    wide = torch.ones(2, dtype=torch.complex128)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "skip", evidence=tmp_path) as guard:
        model(torch.ones(1, 2), freed, wide, conjugate, Grumpy()).sum().backward()
        optimizer.step()
        assert guard.coverage().failures == 0
    folder = step_folders(tmp_path)["step-00000000"]
    batch = load_file(folder / "batch.safetensors")
    assert_same(sorted(batch), ["[0][0]", "[0][3]"])
    assert_same(batch["[0][3]"], torch.tensor([1 - 2j]))
    as_kept((folder / "left_out.txt").read_text().splitlines())


@pytest.mark.parametrize("size", [0, 120, 500])
def test_a_full_disk_stops_nothing_and_is_said_once(tmp_path, caplog, size, as_kept):
    with no_file_beyond(size):
        guard, _ = bad_steps(tmp_path, count=3, keep=2)
    assert guard.num_skipped == 3 and guard.coverage().failures == 0
    as_kept([each for each in caplog.messages if "evidence of" in each])
    if not size:  # not even the marker
        assert guard.last_report.evidence is None
        assert not list(tmp_path.glob("overflow_fast/*/step-*"))
    for path in tmp_path.rglob("*.safetensors"):
        load_file(path)  # whole, or not there


def test_a_folder_that_is_removed_meanwhile_is_made_again(tmp_path, caplog):
    model, optimizer = make()
    folder = tmp_path / "bad"
    with OverflowGuard(model, optimizer, "skip", evidence=Evidence(folder, keep=1)):
        for batch in batches(2):
            shutil.rmtree(folder, ignore_errors=True)
            with plant(model.head, INF):
                train_step(model, optimizer, batch)
    assert list(step_folders(folder)) == ["step-00000001"]
    assert "evidence of" not in caplog.text
