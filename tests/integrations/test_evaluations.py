"""Evaluations inside a training: a bad value there is logged, and ends no run."""

import logging

import pytest
import torch
from lightning_fits import Lit, data, guard_callback, make_trainer
from torch import nn

from overflow_fast import NonFiniteError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
BAD_BATCH, BAD_ROW = 1, 2


def batches():
    torch.manual_seed(0)
    rows = torch.randn(12, 2)
    rows[4 * BAD_BATCH + BAD_ROW] = float("inf")
    return rows


class Validated(Lit):
    def validation_step(self, batch, index):
        self.seen = getattr(self, "seen", 0) + 1
        self.layer(batch)


def validated(tmp_path, **arguments):
    callback = guard_callback(**arguments)
    trainer = make_trainer(tmp_path, callback, num_sanity_val_steps=0)
    module = Validated()
    loader = torch.utils.data.DataLoader(batches(), batch_size=4)
    trainer.fit(module, data(), loader)
    return callback, module


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1)

    def forward(self, x, labels=None):
        out = self.layer(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


def evaluated(tmp_path, **arguments):
    from overflow_fast.integrations.trainer import TrainerGuardCallback

    callback = TrainerGuardCallback(**arguments)
    rows = [{"x": x, "labels": torch.zeros(1)} for x in batches()]
    good = [{"x": torch.ones(2), "labels": torch.zeros(1)}] * 8
    trainer = transformers.Trainer(
        Regression(),
        transformers.TrainingArguments(
            *(str(tmp_path),),
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            eval_strategy="epoch",
            num_train_epochs=2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=good,
        eval_dataset=rows,
        callbacks=[callback],
    )
    trainer.train()
    return callback, trainer


RUNS = {"Lightning": validated, "transformers": evaluated}


@pytest.mark.parametrize("policy", ["raise", "skip", "callable"])
@pytest.mark.parametrize("run", RUNS)
def test_a_bad_value_of_an_evaluation_is_logged_with_its_batch_and_rows(
    run, policy, tmp_path, caplog
):
    asked = []
    own = (lambda report: asked.append(report) or "raise") if policy[0] == "c" else None
    with caplog.at_level(logging.WARNING, "overflow_fast"):
        callback, _ = RUNS[run](tmp_path, on_overflow=own or policy)
    report = callback.guard.last_report
    assert (report.moment, report.action) == ("evaluation", "warn")
    (note,) = [each for each in report.notes if "evaluation" in each]
    assert f"batch {BAD_BATCH} " in note
    assert f"sample {BAD_ROW} of 4" in note
    assert not asked
    assert note.split(";")[0] in " ".join(caplog.text.split())
    assert "does not show this loss" not in caplog.text  # that of training is finite


@pytest.mark.parametrize("run", RUNS)
def test_it_is_an_alarm_if_that_is_asked_for(run, tmp_path):
    with pytest.raises(NonFiniteError) as raised:
        RUNS[run](tmp_path, evaluation="alarm")
    assert raised.value.report.moment == "evaluation"


def test_training_goes_on_behind_it(tmp_path):
    _, module = validated(tmp_path)
    assert module.seen == 3
    callback, trainer = evaluated(tmp_path)
    assert trainer.state.global_step == 4
    assert callback.guard.coverage().steps == 4
    assert "prediction_step" not in vars(trainer)


def test_other_values_are_refused(as_kept):
    as_kept.error(ValueError, guard_callback, evaluation="raise")


@pytest.mark.parametrize("run", RUNS)
def test_alarms_after_the_first_name_their_batch_too_and_are_no_steps(
    run, tmp_path, caplog, monkeypatch
):
    rows = batches()
    rows[4 * (BAD_BATCH + 1)] = float("inf")
    monkeypatch.setitem(globals(), "batches", lambda: rows)
    with caplog.at_level(logging.WARNING, "overflow_fast"):
        RUNS[run](tmp_path, on_overflow="skip")
    assert "in a row" not in caplog.text
    short = [text for text in caplog.messages if "2nd alarm of this place" in text]
    (text,) = short
    assert f"It is of batch {BAD_BATCH + 1} (from 0) of an evaluation" in text
