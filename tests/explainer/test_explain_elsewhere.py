"""A step is explained from its evidence, by a command, in another process."""

import json
from pathlib import Path

import pytest
import torch
from processes import python

from overflow_fast import NonFiniteError, OverflowGuard

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.layer(x)
        return torch.sqrt(hidden - hidden.max()).mean()

def build():
    torch.manual_seed(0)
    return Net()

def loss(model, batch):
    return model(batch["x"])

def other():
    torch.manual_seed(1)
    return Net()
"""


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """The folder of a bad step, and the file of its model."""
    top = tmp_path_factory.mktemp("elsewhere")
    path = top / "model.py"
    path.write_text(SOURCE)
    space = {"__name__": "model"}
    exec(compile(SOURCE, str(path), "exec"), space)
    model = space["build"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = OverflowGuard(model, optimizer, evidence=top / "evidence")
    x = torch.randn(3, 4)
    with pytest.raises(NonFiniteError) as error:
        guard.run(lambda: model(x)).backward()
        optimizer.step()
    guard.remove()
    return Path(error.value.report.evidence), path, error.value.report


def command(folder, *arguments):
    return python("-m", "overflow_fast", "explain", str(folder), *arguments)


def test_the_files_are_there(left):
    folder, _, report = left
    names = {path.name for path in folder.iterdir()}
    assert names >= {"explanation.json", "replay.pt", "report.json"}
    found = json.loads((folder / "explanation.json").read_text())
    assert (found["schema"], found["kind"]) == (1, "explanation")
    assert found["cause"] == report.explanation.cause == "undefined"
    assert found["op"]["name"] == "aten.sqrt"
    assert found["remedies"][0]["is_finite"]


def test_the_command_explains_it(left, as_kept):
    folder, path, _ = left
    done = command(folder, "--model", f"{path}:build", "--loss", f"{path}:loss")
    assert done.returncode == 0, done.stderr
    as_kept(done.stdout)
    whole = ("--model", f"{path}:build", "--loss", f"{path}:loss", "--json")
    assert json.loads(command(folder, *whole).stdout)["module"] == ""


WRONG = {
    "no loss": (("--model", "{path}:build"), "--loss FILE.py:FUNCTION"),
    "other weights": (
        ("--model", "{path}:other", "--loss", "{path}:loss"),
        "2 weights and buffers are not those of the step: layer.weight, layer.bias",
    ),
    "no file": (("--model", "none.py:build"), "--model must be FILE.py:FUNCTION"),
    "no function": (("--model", "{path}:none"), "has no function 'none'"),
    "no model": (("--model", "{path}:dict"), "has no function 'dict'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_said_in_a_sentence(name, left):
    folder, path, _ = left
    arguments, says = WRONG[name]
    done = command(folder, *(each.format(path=path) for each in arguments))
    assert done.returncode == 2
    assert says in done.stderr and "Traceback" not in done.stderr


def test_a_folder_that_is_none(left, tmp_path):
    done = command(tmp_path, "--model", f"{left[1]}:build")
    assert done.returncode == 2 and "replay.pt is missing" in done.stderr
