"""Cells of a notebook that raise by themselves, at what a nan or an inf led to."""

import gc
import sys

import pytest

MODEL = """import torch
from torch import nn
import overflow_fast

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
guard = overflow_fast.OverflowGuard(model, optimizer, {policy!r})
"""
STEP = """x = torch.ones(3, 4)
x[1] = {value}
out = model(x)
assert out.isfinite().all(), "my own check"
out.sum().backward()
optimizer.step()
optimizer.zero_grad()
"""


@pytest.fixture
def shell():
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    try:
        yield interactive.InteractiveShell.instance()
    finally:
        interactive.InteractiveShell.clear_instance()
        gc.collect()


def run(shell, text, **names):
    return shell.run_cell(text.format(**names), store_history=True)


@pytest.mark.parametrize("policy", ["raise", "skip", "warn"])
def test_loop_code_of_a_cell_is_reported_in_its_step(shell, capsys, policy):
    assert run(shell, MODEL, policy=policy).success
    guard = shell.user_ns["guard"]
    assert run(shell, STEP, value=1.0).success
    result = run(shell, STEP, value="torch.nan")
    assert isinstance(result.error_in_exec, AssertionError)
    report = guard.last_report
    assert (report.step, report.raised) == (1, "AssertionError")
    assert report.verdict.first.fqn == "0"
    shown = capsys.readouterr().out
    assert "my own check" in shown
    if sys.version_info >= (3, 11):
        assert report.headline()[:20] in shown  # in what the cell shows
    if policy == "skip":
        run(shell, "optimizer.zero_grad()")
        assert run(shell, STEP, value=1.0).success
        assert guard.last_report is report
    guard.remove()


def test_an_error_of_a_cell_without_a_bad_value_is_left_alone(shell, capsys):
    run(shell, MODEL, policy="raise")
    assert run(shell, STEP, value=1.0).success
    result = run(shell, "undefined_name")
    assert not getattr(result.error_in_exec, "__notes__", None)
    assert shell.user_ns["guard"].last_report is None
    assert "NameError" in capsys.readouterr().out
    shell.user_ns["guard"].remove()


def test_the_shell_is_as_before_behind_the_last_guard(shell, capsys):
    before = shell.showtraceback
    run(shell, MODEL, policy="raise")
    assert shell.showtraceback != before
    shell.user_ns["guard"].remove()
    assert shell.showtraceback == before
    run(shell, "undefined_name")
    assert "NameError" in capsys.readouterr().out
