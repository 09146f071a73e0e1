"""An integration in another package, made of the guard's public methods alone.

It is the recipe of docs/guides/trainers.md, for a trainer of a made-up framework.
"""

import ast
import gc
import importlib
import logging
import re
import sys

import pytest
import torch
from lightning_fits import guard_callback, lightning, make_trainer
from made_up_trainer import MadeUpTrainer, loss_of, two_layers
from pages import examples

from overflow_fast import NonFiniteError, OverflowGuard

RECIPE = examples()["docs/guides/trainers.md#a-trainer-of-your-own"]
BAD_STEP, BAD_ROW = 1, 2


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """The recipe as a module of a package of its own."""
    folder = tmp_path / "made_up_framework"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "guarding.py").write_text(f"import overflow_fast\n\n\n{RECIPE}")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("made_up_framework.guarding")
    for name in ("made_up_framework", "made_up_framework.guarding"):
        sys.modules.pop(name, None)


def batches():
    torch.manual_seed(1)
    found = [{"x": torch.randn(4, 2)} for _ in range(3)]
    found[BAD_STEP]["x"][BAD_ROW, 0] = float("inf")
    return found


def fitted(made_up, data, validated=(), fails_at=None, **arguments):
    callback = made_up.GuardCallback(**arguments)
    trainer = MadeUpTrainer(two_layers(), [callback], validated, fails_at)
    trainer.fit(data)
    return callback.guard, trainer


def test_it_needs_public_names_alone():
    names = [
        n.attr for n in ast.walk(ast.parse(RECIPE)) if isinstance(n, ast.Attribute)
    ]
    assert "note_batch" in names
    assert [name for name in names if name.startswith("_")] == []


class Lit(lightning.LightningModule):
    """What the made-up trainer trains, for a built-in integration."""

    def __init__(self):
        super().__init__()
        self.model = two_layers()

    def training_step(self, batch, index):
        return loss_of(self.model, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def without_times(report):
    text = re.sub(r"[\d.]+ s$", "N s", str(report), flags=re.MULTILINE)
    return re.sub(r"takes [\d.]+%", "takes N%", text)


def test_its_report_is_that_of_a_built_in_one(made_up, tmp_path):
    own, trainer = fitted(made_up, batches(), on_overflow="skip")
    built_in = guard_callback(on_overflow="skip")
    loader = torch.utils.data.DataLoader(batches(), batch_size=None)
    make_trainer(tmp_path, built_in).fit(Lit(), loader)
    report = own.last_report
    assert without_times(report) == without_times(built_in.guard.last_report)
    assert report.step == BAD_STEP and own.num_skipped == 1
    assert (
        f"`batch['x']`, sample {BAD_ROW} of 4" in report.verdict.origin.batch_places[0]
    )
    assert report.explanation.cause == "bad data"
    assert trainer.scheduler.last_epoch == 2
    assert trainer.saved == [3] and not own.enabled


def test_an_exception_of_the_program_gets_the_report(made_up):
    callback = made_up.GuardCallback(on_overflow="skip")
    trainer = MadeUpTrainer(two_layers(), [callback], fails_at=BAD_STEP)
    with pytest.raises(ValueError, match="constraint") as raised:
        trainer.fit(batches())
    report = callback.guard.last_report
    assert (report.step, report.moment) == (BAD_STEP, "raised")
    assert report.raised == "ValueError"
    if sys.version_info >= (3, 11):
        (note,) = raised.value.__notes__
        assert report.headline() in note
    assert trainer.saved == [] and not callback.guard.enabled


def test_an_evaluation_is_logged_and_ends_nothing(made_up, caplog):
    clean = [each for i, each in enumerate(batches()) if i != BAD_STEP]
    with caplog.at_level(logging.WARNING, "overflow_fast"):
        guard, trainer = fitted(made_up, clean, validated=batches())
    report = guard.last_report
    assert (report.moment, report.action) == ("evaluation", "warn")
    assert f"batch {BAD_STEP} (from 0) of an evaluation" in " ".join(report.notes)
    assert guard.coverage().steps == 2 and trainer.saved == [2]


def test_a_bad_state_is_not_saved(made_up):
    callback = made_up.GuardCallback(on_overflow="warn")
    trainer = MadeUpTrainer(two_layers(), [callback])
    with pytest.raises(NonFiniteError, match="Do not save this state"):
        trainer.fit(batches())
    assert trainer.saved == []


def test_a_batch_of_an_evaluation_has_a_number(made_up):
    guard, _ = fitted(made_up, batches()[:1])
    with pytest.raises(TypeError, match="batch must be an int, got str"):
        guard.note_evaluation("first")
    with pytest.raises(ValueError, match="batch must be at least 0, got -1"):
        guard.note_evaluation(-1)


@pytest.mark.parametrize("records_loss", [True, False])
def test_a_loss_that_is_recorded_elsewhere_is_left_alone(records_loss):
    model, x = two_layers(), torch.ones(4, 2)
    with OverflowGuard(model, watch=["loss"], on_overflow="warn") as guard:
        guard.run(lambda: model(x).mean() * torch.inf, records_loss=records_loss)
        assert (guard.check() is not None) == records_loss


def test_a_guard_says_what_it_watches():
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters())
    guard = OverflowGuard({"model": model}, optimizer)
    assert guard.models == [model] and guard.optimizers == [optimizer]
    guard.remove()
    del model, optimizer
    gc.collect()
    assert guard.models == guard.optimizers == []
