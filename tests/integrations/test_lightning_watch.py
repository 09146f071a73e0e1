"""Losses, parameters and parts that the guard watches in a LightningModule."""

import pytest
import torch
from guarding import INF, NAN
from lightning_fits import (
    Hooks,
    Lit,
    Manual,
    data,
    fit,
    guard_callback,
    left_behind,
    lightning,
)
from torch import nn

from overflow_fast import NonFiniteError

pytestmark = [
    pytest.mark.xdist_group("lightning"),
    pytest.mark.filterwarnings("ignore"),
]


class BadTensor(Lit):
    def training_step(self, batch, index):
        return super().training_step(batch, index) * NAN


class BadDict(Lit):
    def training_step(self, batch, index):
        return {"loss": super().training_step(batch, index) * INF, "more": batch}


class BadManual(Manual):
    def loss_of(self, output):
        return super().loss_of(output) * INF


@pytest.mark.parametrize("module", [BadTensor, BadDict, BadManual])
def test_the_loss_of_a_lightning_module_is_recorded(tmp_path, module):
    callback = guard_callback(on_overflow="skip")
    fit(tmp_path, callback, module=module(), count=1)
    first = callback.guard.last_report.verdict.first
    assert (first.kind, first.label) == ("recorded", "loss")
    callback = guard_callback(on_overflow="skip", watch=["activations"])
    fit(tmp_path, callback, module=module(), count=1)
    assert callback.guard.last_report is None


def test_a_loss_that_overflows_when_it_is_scaled_is_no_alarm(tmp_path):
    from lightning.pytorch.plugins import MixedPrecision

    class Half(Lit):
        def training_step(self, batch, index):
            return super().training_step(batch, index).half() + 9

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=1)
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    callback = guard_callback(on_overflow="raise")
    fit(tmp_path, callback, module=Half(), plugins=[precision])
    assert callback.guard.last_report is None
    assert scaler.get_scale() < 2.0**15


def test_a_lightning_modules_own_parameters_are_watched(tmp_path):
    class Spoiled(Lit):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            return loss + (self.scale - self.scale.detach()).sqrt().sum() * 0

    callback = guard_callback(on_overflow="skip")
    fit(tmp_path, callback, module=Spoiled(), count=1)
    assert callback.guard.last_report.verdict.first.fqn == "scale"

    def spoil(trainer, module):
        module.scale.data.fill_(NAN)
        trainer.save_checkpoint(tmp_path / "bad.ckpt")

    hooks = Hooks(on_train_batch_end=spoil)
    with pytest.raises(NonFiniteError, match="weight scale"):
        fit(tmp_path, guard_callback(on_overflow="warn"), hooks)
    assert not (tmp_path / "bad.ckpt").exists()


def test_a_scripted_part_does_not_stop_the_fit(tmp_path, caplog):
    module = Lit()
    module.frozen = torch.jit.script(nn.Linear(2, 1))
    callback = guard_callback()
    fit(tmp_path, callback, module=module)
    assert "TorchScript has no hooks" in caplog.text or "script" in caplog.text
    assert callback.guard.coverage().steps == 3
    module.frozen.weight.data.fill_(NAN)
    with pytest.raises(NonFiniteError, match=r"frozen\.weight"):
        fit(tmp_path, guard_callback(), module=module)


def test_what_a_tuner_tries_out_is_not_judged(tmp_path):
    from lightning.pytorch.callbacks import LearningRateFinder

    class Diverging(Lit):
        def __init__(self):
            super().__init__()
            self.lr = 0.01

        def training_step(self, batch, index):
            is_tuning = self.optimizers().param_groups[0]["lr"] != self.lr
            loss = super().training_step(batch, index)
            return loss * NAN if is_tuning else loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    finder = LearningRateFinder(num_training_steps=3, update_attr=False)
    callback = guard_callback(on_overflow="raise")
    fit(tmp_path, callback, finder, module=Diverging())
    assert callback.guard.coverage().steps == 3


def test_optimizers_that_are_exchanged_before_training_are_guarded(tmp_path):
    def exchange(trainer, module):
        trainer.strategy.optimizers = [torch.optim.Adam(module.parameters())]

    callback = guard_callback(on_overflow="skip")
    hooks = Hooks(on_fit_start=exchange)
    trainer, module = fit(tmp_path, callback, hooks, module=BadTensor())
    assert callback.guard.num_skipped == 3
    assert left_behind(trainer, module) == []


def test_a_trainer_without_anything_to_fit_runs(tmp_path):
    class Bare(Lit):
        def configure_optimizers(self):
            return None

        def validation_step(self, batch, index):
            self.layer(batch)

        predict_step = test_step = validation_step

    trainer, module = fit(tmp_path, guard_callback(), module=Bare(), barebones=False)
    for run in (trainer.validate, trainer.test, trainer.predict):
        run(module, data())
    fit(tmp_path, guard_callback(), fast_dev_run=True)
    minimal = lightning.Trainer(accelerator="cpu", barebones=True, max_steps=1)
    minimal.callbacks.append(guard_callback())
    minimal.fit(Lit(), data())


class Calls(lightning.loggers.Logger):
    """Keeps each call."""

    name = version = "calls"

    def __init__(self):
        super().__init__()
        self.calls = []

    def log_metrics(self, metrics, step=None):
        self.calls.append((step, dict(metrics)))

    def log_hyperparams(self, *args, **kwargs):
        pass


class Logged(Lit):
    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.log("train", loss)
        return loss


@pytest.mark.parametrize("every, steps", [(1, [0, 1, 2]), (2, [1])])
def test_a_logger_has_one_call_for_each_logged_step(tmp_path, every, steps):
    logger = Calls()
    options = {"logger": logger, "log_every_n_steps": every}
    fit(tmp_path, guard_callback(), module=Logged(), **options)
    assert [step for step, _ in logger.calls] == steps
    for _, metrics in logger.calls:
        assert {"train", "overflow_fast/steps_total"} <= set(metrics)
    logger.calls.clear()
    fit(tmp_path, guard_callback(to_loggers=False), module=Logged(), **options)
    assert [set(metrics) - {"epoch"} for _, metrics in logger.calls] == [
        {"train"} for _ in steps
    ]


class NoOptimizer(Lit):
    bad = -1

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return loss * NAN if index == self.bad else loss

    def configure_optimizers(self):
        return None


def test_a_fit_without_an_optimizer_is_judged_for_each_batch(tmp_path, caplog):
    fit(tmp_path, guard_callback(), module=NoOptimizer())
    assert not [each for each in caplog.records if "overflow_fast" in each.name]
    module = NoOptimizer()
    module.bad = 1
    with pytest.raises(NonFiniteError) as caught:
        fit(tmp_path, guard_callback(), module=module)
    assert caught.value.report.step == 1


@pytest.mark.parametrize("explain", [False, "auto"])
def test_what_training_step_made_is_not_laid_at_the_training_loop(
    tmp_path, explain, as_kept
):
    class Divided(Lit):
        def training_step(self, batch, index):
            return super().training_step(batch / 0, index)

    callback = guard_callback(on_overflow="warn", explain=explain)
    fit(tmp_path, callback, module=Divided(), count=1)
    report = callback.guard.last_report
    assert "training loop" not in str(report)
    as_kept(report.sentences())
    assert report.verdict.origin.candidates == ["training_step"]
