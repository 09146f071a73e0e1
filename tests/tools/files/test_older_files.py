"""Files that releases wrote stay readable: one folder of tests/files for each release.

They were written by a run of that release. None is ever written anew: a field that has
come since has to have a default, and one that has gone is passed over.
"""

import json
import math

import pytest
import torch
from pages import ROOT

import overflow_fast
from overflow_fast.__main__ import main
from overflow_fast.tools.cli.logged_incidents import read_incidents
from overflow_fast.tools.page.incidents import read_incidents as read_evidence

RELEASES = sorted((ROOT / "tests" / "files").iterdir())

of_each_release = pytest.mark.parametrize("folder", RELEASES, ids=lambda p: p.name)


@of_each_release
def test_a_flight_record_is_read(folder):
    record = overflow_fast.read_record(folder / "run.ofr")
    assert (record.num_damaged, record.is_truncated) == (0, False)
    assert record.run["models"] == ["Net"]
    assert sum(step.count for step in record.steps) == 130
    assert {step.count for step in record.steps} == {1, 4, 16, 48}
    bad = next(step for step in record.steps if step.action == "skip")
    assert (bad.first, bad.num_skipped) == (125, 1) and math.isnan(bad.loss)
    assert record.steps[0].grad_norm == pytest.approx(4.2, abs=1)
    assert record.steps[0].learning_rate == 1e-6
    assert 0 < record.steps[0].guard_share < 1
    assert {each.kind for each in record.entries} >= {"output", "gradient", "recorded"}
    assert record.values["num_zero"].max() >= 0


@of_each_release
def test_the_incidents_of_a_log_are_read(folder):
    (found,) = read_incidents(folder / "guard.jsonl")
    assert (found.step, found.first, found.host) == (125, "down: input[0]", "host")
    assert (found.device, found.cause) == ("cpu", "range overflow")


@of_each_release
def test_a_log_has_a_line_of_each_kind(folder):
    path = folder / "guard.jsonl"
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert set(kinds) == {"run", "step", "spike", "notice"}


@of_each_release
def test_evidence_is_read(folder):
    (incident,), damaged = read_evidence(folder / "step-00000125")
    assert damaged == [] and incident.step == 125
    assert incident.explanation["op"]["name"] == "aten.exp"
    assert incident.explanation["remedies"] and incident.report["frames"]


@of_each_release
def test_a_step_is_explained(folder, tmp_path, capsys):
    pytest.importorskip("safetensors")
    (tmp_path / "model.py").write_text(MODEL)
    made = [f"--{name}={tmp_path / 'model.py'}:{name}" for name in ("model", "loss")]
    step = str(folder / "step-00000125")
    assert main(["explain", step, *made, "--any-weights", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["op"]["name"] == "aten.exp"


MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.down(self.up(x).exp())

def model():
    net = Net()
    torch.nn.init.constant_(net.up.weight, 0.5)
    return net

def loss(model, batch):
    return model(batch["x"]).square().mean()
"""


@of_each_release
def test_a_recording_is_read_and_compared(folder, tmp_path):
    pytest.importorskip("safetensors")
    torch.manual_seed(0)
    namespace = {}
    exec(MODEL, namespace)
    model = namespace["model"]()
    with overflow_fast.recording(tmp_path / "new", model):
        model(2 * torch.ones(4, 2)).mean().backward()
    found = overflow_fast.compare(tmp_path / "new", folder / "recording")
    assert found.num_compared > 10 and found.differs
    assert "left out" not in "".join(found.said)
    same = overflow_fast.compare(folder / "recording", folder / "recording")
    assert not same.differs
