"""Names in notebooks, where a file of a line is a cell."""

import pytest

from overflow_fast import explain
from overflow_fast.text import short_name

CELL = """
import torch
from torch import nn

class Root(nn.Module):
    def forward(self, x):
        return torch.sqrt(x - 9)
"""


def test_a_line_of_a_cell_is_named_by_the_cell():
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    shell = interactive.InteractiveShell.instance()
    try:
        assert shell.run_cell(CELL, store_history=True).success
        names = shell.user_ns
        found = explain(names["Root"](), {"x": names["torch"].ones(2)})
        assert found.op.place == f"In[{shell.execution_count - 1}]:6"
        assert found.op.code == "return torch.sqrt(x - 9)"
    finally:
        interactive.InteractiveShell.clear_instance()


def test_other_files_keep_their_names():
    assert short_name("/somewhere/train.py") == "train.py"
