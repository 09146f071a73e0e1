"""The README's Python examples, word for word, and the report that it shows."""

import json
import re

import pytest
from answers.run import summary
from answers.tools import TOOLS
from guarding import batches
from pages import ROOT, Examples, Programs, assert_shown, output_of, run
from small_models import Small, loader_of, quiet, sgd, trainer
from torch import nn

import overflow_fast

runs = Examples("README.md")
README = (ROOT / "README.md").read_text()


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@runs("got-a-nan-do-this")
def test_the_loop(code):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    names = {"model": model, "optimizer": sgd(model), "criterion": nn.MSELoss()}
    assert run(code, **names, loader=batches(3))["guard"].step == 3
    (x, y), *_ = batches(1)
    with pytest.raises(overflow_fast.NonFiniteError, match="Step 1: "):
        run(code, **names, loader=[(x, y), (x, y * float("inf"))])


@pytest.mark.slow
@runs("got-a-nan-do-this 2")
def test_trainer_in_short(code):
    known = run(code, trainer=trainer())
    known["trainer"].train()
    callback = known["trainer"].callback_handler.callbacks[-1]
    assert callback.guard.step == 4


@runs("got-a-nan-do-this 4")
def test_accelerate_in_short(code):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = Small()
    model, optimizer = accelerator.prepare(model, sgd(model))
    known = run(code, accelerator=accelerator, model=model, optimizer=optimizer)
    accelerator.backward(model(**next(iter(loader_of(2)))).loss)
    optimizer.step()
    assert known["guard"].step == 1


@runs("got-a-nan-do-this 3")
def test_lightning_in_short(code):
    lightning = pytest.importorskip("lightning.pytorch")
    known = run(code, Trainer=quiet(lightning))
    kinds = [type(each) for each in known["trainer"].callbacks]
    assert known["LightningGuardCallback"] in kinds


def test_the_readme_shows_a_report_of_today(tmp_path):
    program = Programs("docs/reading-a-report.md")["a-report"]
    assert_shown("README.md", "Step 2", output_of(program.code, tmp_path))


def test_who_names_the_cause_is_what_was_measured():
    rows = json.loads((ROOT / "benchmarks/results/raw/answers-cpu.json").read_text())[
        "rows"
    ]
    measured = {each["tool"]: each for each in summary(rows, list(TOOLS))}
    cells = r"(\d+)(?: of \d+)? \| " * 3 + r"(\d+)(?: of \d+)? \|"
    shown = re.findall(rf"^\| .*? \| {cells}$", README, re.M)
    order = [
        "ours-run",
        "ours",
        "transformers",
        "detect_anomaly",
        "debugmode",
        "msprobe",
    ]
    parts = ["module", "op", "cause", "misleads"]
    true = [tuple(str(measured[tool][part]) for part in parts) for tool in order]
    assert shown == true


def test_every_example_is_run():
    assert not runs.untested
