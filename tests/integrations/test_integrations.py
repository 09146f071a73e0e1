"""transformers' Trainer with this package's detector in place of its own."""

import sys

import pytest
import torch
import transformers.debug_utils
import transformers.trainer
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.debug_utils import DebugUnderflowOverflow as Original

from overflow_fast import DebugUnderflowOverflow
from overflow_fast.integrations.transformers import TrainerDetector, install, uninstall

pytestmark = pytest.mark.slow


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": (self.linear(x).squeeze(-1) - labels).square().mean()}


def trainer_of(model, tmp_path, **arguments):
    data = [{"x": torch.ones(4) * i, "labels": torch.tensor(1.0)} for i in range(4)]
    settings = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        debug="underflow_overflow",
        **arguments,
    )
    return Trainer(model=model, args=settings, train_dataset=data)


@pytest.fixture(autouse=True)
def transformers_as_it_was():
    yield
    uninstall()
    assert transformers.trainer.DebugUnderflowOverflow is Original


def detectors_on(model):
    hooks = [hook.args[0] for hook in model.linear._forward_hooks.values()]
    owners = {id(hook.owner): hook.owner for hook in hooks}
    return list(owners.values())


def test_trainer_attaches_ours_once_however_often_it_trains(tmp_path):
    with install():
        model = Regression()
        trainer = trainer_of(model, tmp_path)
        trainer.train()
        trainer.train()
        (detector,) = detectors_on(model)
        assert isinstance(detector, TrainerDetector)
        assert detector.batch_number == 2
    assert len(detectors_on(model)) == 1


@pytest.mark.day
def test_an_overflow_stops_the_training_with_the_report(tmp_path, capsys, as_kept):
    model = Regression()
    model.linear.weight.data.fill_(3e38)
    with install(), pytest.raises(ValueError, match="inf/nan detected"):
        trainer_of(model, tmp_path).train()
    as_kept(capsys.readouterr().out)


def test_training_is_what_it_is_without(tmp_path):
    def weights(watched):
        torch.manual_seed(0)
        model = Regression()
        if watched:
            with install():
                trainer_of(model, tmp_path).train()
        else:
            trainer = trainer_of(model, tmp_path)
            trainer.args.debug = []
            trainer.train()
        return model.linear.weight.detach()

    assert torch.equal(weights(True), weights(False))


def test_install_and_uninstall_are_exact_and_idempotent():
    before = dict(vars(transformers.debug_utils))
    install()
    install()
    assert transformers.trainer.DebugUnderflowOverflow is TrainerDetector
    assert transformers.debug_utils.DebugUnderflowOverflow is TrainerDetector
    uninstall()
    uninstall()
    assert vars(transformers.debug_utils) == before


def test_leaving_puts_back_what_was_there():
    with install():
        with install():
            pass
        assert transformers.trainer.DebugUnderflowOverflow is TrainerDetector
    assert transformers.trainer.DebugUnderflowOverflow is Original


def test_a_trainer_that_is_imported_later_is_reached_and_given_back(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers.trainer")
    with install():
        import transformers.trainer as later

        monkeypatch.setitem(sys.modules, "transformers.trainer", later)
        assert later.DebugUnderflowOverflow is TrainerDetector
    assert later.DebugUnderflowOverflow is Original


def test_other_detectors_are_left_alone(tmp_path):
    model = Regression()
    mine = DebugUnderflowOverflow(model)
    with install():
        trainer_of(model, tmp_path).train()
    assert len(detectors_on(model)) == 2 and mine in detectors_on(model)


def test_transformers_is_missing(monkeypatch, as_kept):
    monkeypatch.setitem(sys.modules, "transformers.debug_utils", None)
    as_kept.error(ImportError, install)


def test_transformers_without_a_detector(monkeypatch, as_kept):
    monkeypatch.delattr(transformers.debug_utils, "DebugUnderflowOverflow")
    version = transformers.__version__
    with pytest.raises(ImportError) as raised:
        install()
    as_kept(str(raised.value).replace(version, "VERSION"))
