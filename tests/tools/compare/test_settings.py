"""Plain attributes and arguments, and gradients that reach a module in one run."""

import contextlib
import json

import pytest
import torch
from processes import python
from torch import nn

import overflow_fast


class Scaled(nn.Module):
    def forward(self, x, factor=1.0, *, shift=0.0):
        return x * factor + shift


class Caller(nn.Module):
    def __init__(self, factor=1.0, shift=0.0):
        super().__init__()
        self.inner = Scaled()
        self._factor, self._shift = factor, shift

    def forward(self, x):
        return self.inner(x, self._factor, shift=self._shift)


def x_of():
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def compared(tmp_path):
    def compare(make, *options, backward=True):
        for name, each in zip("ab", options, strict=True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(16, 16), make(each), nn.Linear(16, 4))
            model(x_of())  # what runs before is not recorded
            with overflow_fast.recording(tmp_path / name, model):
                loss = model(x_of()).square().sum()
                if backward:
                    loss.backward()
        return overflow_fast.compare(tmp_path / "a", tmp_path / "b")

    return compare


SETTINGS = {
    "eps": (lambda v: nn.LayerNorm(16, eps=v), 1e-2, 1e-5, "1", "eps is 0.01, against"),
    "slope": (nn.LeakyReLU, 0.1, 0.3, "1", "negative_slope is 0.1, against 0.3"),
    "approximate": (
        lambda v: nn.GELU(approximate=v),
        *("tanh", "none", "1", "approximate is 'tanh', against 'none'"),
    ),
    "argument": (Caller, 1.5, 1.0, "1.inner", "input[1] is 1.5, against 1.0"),
    "keyword": (
        lambda v: Caller(shift=v),
        *(0.5, 0.0, "1.inner", "input.shift is 0.5, against 0.0"),
    ),
}


@pytest.mark.parametrize("case", SETTINGS.values(), ids=SETTINGS)
def test_a_setting_that_differs_is_the_answer(compared, case):
    make, mine, its, module, text = case
    diff = compared(make, mine, its)
    assert (diff.first.module, diff.first.kind) == (module, "forward"), diff
    assert f"Its {text}" in str(diff.first)
    assert any(text in each for each in diff.said)


def test_a_setting_that_changes_nothing_is_said_and_no_difference(compared, as_kept):
    diff = compared(lambda p: nn.Dropout(p).eval(), 0.5, 0.1)
    assert diff.first is None and not diff.differs
    as_kept(diff.said)


def test_training_of_a_module_is_a_setting(compared, as_kept):
    diff = compared(lambda mode: nn.BatchNorm1d(16).train(mode), True, False)
    as_kept(diff.said)


def test_private_attributes_and_objects_are_not_recorded(compared, tmp_path):
    diff = compared(lambda v: Caller(v), 1.0, 1.0)
    assert diff.said == []
    lines = (tmp_path / "a" / "rank-0.step-0.jsonl").read_text().splitlines()
    settings = json.loads(lines[0])["settings"]
    assert settings["1"] == {"training": "True"}
    assert settings["1.inner #0"] == {"input[1]": "1.0", "input.shift": "0.0"}
    assert settings["0"]["in_features"] == "16"


def test_models_side_by_side_have_them_too(as_kept):
    models = [nn.Sequential(nn.LayerNorm(16, eps=eps)) for eps in (1e-2, 1e-5)]
    diff = overflow_fast.compare_live(*models, x_of())
    as_kept(diff.first)


class Block(nn.Module):
    def __init__(self, cut):
        super().__init__()
        self.norm, self.f = nn.LayerNorm(16), nn.Linear(16, 16)
        self._cut = cut

    def forward(self, x):
        with torch.set_grad_enabled(self._cut != "no_grad"):
            y = self.f(self.norm(x))
        x = x.detach() if self._cut == "residual" else x
        return x + (y.detach() if self._cut == "branch" else y)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_detached_residual_blames_no_module_alone(compared, is_first, as_kept):
    cuts = ("residual", "") if is_first else ("", "residual")
    diff = compared(Block, *cuts)
    assert (diff.first.module, diff.first.kind) == ("1", "backward"), diff
    as_kept(diff.first)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_detached_branch_is_the_answer(compared, is_first, as_kept):
    cuts = ("branch", "") if is_first else ("", "branch")
    diff = compared(Block, *cuts)
    assert (diff.first.module, diff.first.kind) == ("1.f", "detached"), diff
    as_kept(diff.first)


def test_a_branch_without_gradients_says_so(compared, as_kept):
    diff = compared(Block, "no_grad", "")
    assert (diff.first.module, diff.first.kind) == ("1.f", "detached"), diff
    as_kept(diff.first)


def test_runs_without_any_backward_say_nothing(compared):
    assert compared(Block, "branch", "", backward=False).first is None


def test_frozen_weights_are_named(tmp_path, as_kept):
    for name in "ab":
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        if name == "a":
            model[0].requires_grad_(False)
        with overflow_fast.recording(tmp_path / name, model), contextlib.nullcontext():
            model(x_of()).sum().backward()
    diff = overflow_fast.compare(tmp_path / "a", tmp_path / "b")
    assert diff.first.kind == "detached", diff
    as_kept(diff.first)


PRECISIONS = """
import sys, torch, overflow_fast
exec(sys.argv[1])
model = torch.nn.Linear(2, 2)
with overflow_fast.recording(sys.argv[2], model):
    model(torch.ones(1, 2))
print(overflow_fast.compare_live(model, model, torch.ones(1, 2)).differs)
"""


@pytest.mark.parametrize(
    "setting, value",
    [
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "tf32"),
        ("torch.backends.fp32_precision = 'ieee'", "ieee"),
        ("torch.set_float32_matmul_precision('high')", "tf32"),
    ],
)
def test_a_program_may_set_precisions_in_either_way(setting, value, tmp_path):
    done = python("-c", PRECISIONS, setting, str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    lines = (tmp_path / "rank-0.step-0.jsonl").read_text().splitlines()
    run = json.loads(lines[0])["settings"]["the run"]
    assert run["cuda.matmul.fp32_precision"] == value
