"""Notebooks, where the file of a line is a cell."""

import gc
import weakref

import pytest

from overflow_fast import NonFiniteError, explain
from overflow_fast.base.source_files import is_cell, short_name, source_name

CELL = """
import torch
from torch import nn

class Root(nn.Module):
    def forward(self, x):
        return torch.sqrt(x - 9)
"""
# The imports of a cell are not compiled with its functions.
MODEL = """import math
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        h = self.layer(x)
        return {}
"""
TRAIN = """import overflow_fast
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
guard = overflow_fast.OverflowGuard(model, optimizer, evidence={folder!r})

def step():
    loss = guard.run(lambda: model(torch.ones(3, 2)).sum())
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def shell():
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    try:
        yield interactive.InteractiveShell.instance()
    finally:
        interactive.InteractiveShell.clear_instance()
        gc.collect()


def run(shell, text):
    """Runs a cell; returns its name."""
    result = shell.run_cell(text, store_history=True)
    assert result.success, result
    return f"In[{shell.execution_count - 1}]"


def test_a_line_of_a_cell_is_named_by_the_cell(shell):
    cell = run(shell, CELL)
    names = shell.user_ns
    found = explain(names["Root"](), {"x": names["torch"].ones(2)})
    assert found.op.place == f"{cell}:6"
    assert found.op.code == "return torch.sqrt(x - 9)"


@pytest.mark.parametrize(
    "expression",
    [
        "(h - h).log()",
        "torch.softmax((h - h).log(), -1) @ h.T",
        "torch.log(h - h) * math.sqrt(2)",
        "nn.functional.relu(torch.sqrt(h - h - 1))",
    ],
)
def test_a_line_of_a_cell_is_changed_in_a_trial(shell, tmp_path, expression):
    cell = run(shell, MODEL.format(expression))
    other = run(shell, TRAIN.format(folder=str(tmp_path)))
    with pytest.raises(NonFiniteError) as caught:
        shell.user_ns["step"]()
    report = caught.value.report
    best = report.explanation.remedies[0]
    assert best.is_recommended and best.place == f"{cell}:12"
    assert best.file == report.explanation.op.file == cell
    assert f"{other}:8 in <lambda>" in report.explanation.op.stack
    # No file, in memory or kept, names the temporary one of a cell.
    file = shell.user_ns["step"].__code__.co_filename
    assert source_name(file) == other and is_cell(other)
    kept = [each for each in tmp_path.rglob("*") if each.is_file()]
    texts = [each.read_text(errors="replace") for each in kept] + [str(report)]
    assert len(texts) > 3 and not any(file in text for text in texts)
    (page,) = (each.read_text() for each in kept if each.name == "page.html")
    assert best.place in page and "A line of a notebook" in page
    shell.user_ns["guard"].remove()


SHOWN = """import weakref
import overflow_fast
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
guard = overflow_fast.OverflowGuard(model, optimizer)
guard
"""
BATCHES = """kept = []

def train(model, optimizer):
    for i in range(3):
        batch = torch.ones(3, 2)
        kept.append(weakref.ref(batch))
        loss = {call}.sum()
        if i == {num_judged}:
            break
        loss.backward()
        optimizer.step()

train(model, optimizer)
"""


@pytest.mark.parametrize("num_judged", [2, 3])
@pytest.mark.parametrize("call", ["model(batch)", "guard.run(lambda: model(batch))"])
def test_a_guard_that_was_shown_keeps_no_batch_of_a_model_that_is_gone(
    shell, call, num_judged
):
    run(shell, MODEL.format("h"))
    run(shell, SHOWN)
    run(shell, BATCHES.format(call=call, num_judged=num_judged))
    names = shell.user_ns
    assert names["guard"] in names["Out"].values()
    names["kept"].append(weakref.ref(names["model"]))
    run(shell, "del model, optimizer")
    gc.collect()
    assert [each() for each in names["kept"]] == [None] * 4


def test_other_files_keep_their_names():
    assert short_name("/somewhere/train.py") == "train.py"
    assert source_name("/somewhere/train.py") == "/somewhere/train.py"
    assert not is_cell("In[3].py")
