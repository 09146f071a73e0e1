"""Steps under transformers' Trainer: their numbers, and copies of callbacks."""

import copy
import pickle

import pytest
import torch
from guarding import NAN
from lightning_fits import NumberOfSteps
from torch import nn

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x, labels=None):
        return {"loss": (self.layer(x) - labels).square().mean()}


@pytest.fixture
def train(tmp_path):
    """Trains a layer with transformers' Trainer."""
    hf = pytest.importorskip("transformers")
    from overflow_fast.integrations.trainer import TrainerGuardCallback

    class Calls(hf.TrainerCallback):
        def __init__(self, function):
            self.function = function

        def on_step_end(self, args, state, control, **kwargs):
            self.function(state, kwargs["model"])

    def run(on_step_end=None, resume=None, before=None, **arguments):
        options = hf.TrainingArguments(
            str(tmp_path),
            max_steps=6,
            per_device_train_batch_size=1,
            save_strategy="steps",
            save_steps=3,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            gradient_accumulation_steps=2,
        )
        rows = [{"x": torch.ones(1), "labels": torch.ones(1)}] * 12
        callbacks = [TrainerGuardCallback(**arguments)]
        if on_step_end is not None:
            callbacks.append(Calls(lambda *args: on_step_end(trainer, *args)))
        trainer = hf.Trainer(
            Regression(), options, train_dataset=rows, callbacks=callbacks
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer, callbacks[0]

    return run


def test_steps_under_transformers_have_its_numbers_also_after_a_resume(train, tmp_path):
    numbers = NumberOfSteps()
    _, callback = train(metrics=numbers)
    assert numbers.steps == [0, 1, 2, 3, 4, 5] and callback.guard.step == 6
    numbers = NumberOfSteps()

    def spoil(trainer, state, model):
        if state.global_step == 4:
            model.layer.weight.data.fill_(NAN)

    path = str(tmp_path / "checkpoint-3")
    _, callback = train(spoil, path, metrics=numbers, on_overflow="warn")
    assert numbers.steps == [3, 4, 5]
    assert callback.guard.last_report.step == 5
    assert callback.guard.coverage().steps == 3


def test_callbacks_of_transformers_can_be_pickled_and_copied(train):
    def save(trainer, state=None, model=None):
        found = trainer.callback_handler.callbacks
        callback = next(each for each in found if hasattr(each, "guard"))
        for same in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
            assert same.guard is None
        pickle.dumps(trainer.model)

    trainer, callback = train(save, on_overflow="skip")
    save(trainer)
    assert callback.guard.coverage().steps == 6
