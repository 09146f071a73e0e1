"""Steps under trainers have the trainer's numbers; loggers get the guard's."""

import pytest
from guarding import NAN
from lightning_fits import (
    Hooks,
    Lit,
    Manual,
    NumberOfSteps,
    fit,
    guard_callback,
    lightning,
)

pytestmark = [
    pytest.mark.xdist_group("lightning"),
    pytest.mark.filterwarnings("ignore"),
]

# Numbers.


class Rows(lightning.loggers.Logger):
    """Keeps what it is given."""

    name, version = "rows", 0

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))

    def steps_with(self, name):
        return [step for step, metrics in self.rows if name in metrics]


class Logging(Lit):
    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.log("loss", loss)
        return loss


class LoggingManual(Manual):
    def training_step(self, batch, index):
        super().training_step(batch, index)
        self.log("loss", 1.0)


@pytest.mark.parametrize(
    "module, arguments",
    [
        (Logging, {"accumulate_grad_batches": 3}),
        (Logging, {"log_every_n_steps": 2}),
        (LoggingManual, {"log_every_n_steps": 3}),
        (Logging, {"log_every_n_steps": 2, "max_steps": 3}),
    ],
)
def test_loggers_get_the_numbers_with_lightnings_own(
    tmp_path, module, arguments, as_kept
):
    logger = Rows()
    arguments = {"log_every_n_steps": 1, **arguments}
    callback = guard_callback()
    fit(tmp_path, callback, module=module(), count=9, logger=logger, **arguments)
    own = logger.steps_with("loss")
    assert own and logger.steps_with("overflow_fast/steps_total") == own
    logger = Rows()
    callback = guard_callback(to_loggers=False)
    fit(tmp_path, callback, module=module(), count=9, logger=logger, **arguments)
    assert logger.steps_with("loss") == own
    assert logger.steps_with("overflow_fast/steps_total") == []
    as_kept.error(TypeError, guard_callback, to_loggers=1)


def test_steps_under_lightning_have_its_numbers_also_after_a_resume(tmp_path):
    def save(trainer, module):
        if trainer.global_step == 2:
            trainer.save_checkpoint(tmp_path / "two.ckpt")

    numbers, alarms = NumberOfSteps(), []
    callback = guard_callback(metrics=numbers)
    fit(tmp_path, callback, Hooks(on_train_batch_end=save))
    assert numbers.steps == [0, 1, 2] and callback.guard.step == 3

    def spoil(trainer, module):
        alarms.append(trainer.global_step)
        module.layer.weight.grad.fill_(NAN)

    hooks = Hooks(on_after_backward=spoil)
    callback = guard_callback(metrics=numbers, on_overflow="skip")
    fit(tmp_path, callback, hooks, ckpt_path=tmp_path / "two.ckpt", max_epochs=2)
    assert numbers.steps[3:] == alarms and alarms[0] == 2
    assert callback.guard.last_report.step == alarms[-1]


@pytest.mark.parametrize(
    "module, arguments, expected",
    [(Manual, {}, [0, 2, 4]), (Lit, {"accumulate_grad_batches": 2}, [0, 1])],
)
def test_steps_are_those_of_the_optimizers(tmp_path, module, arguments, expected):
    numbers = NumberOfSteps()
    callback = guard_callback(metrics=numbers)
    trainer, _ = fit(tmp_path, callback, module=module(), **arguments)
    assert numbers.steps == expected
    assert callback.guard.step == trainer.global_step


def test_a_callback_reads_generators_once_for_each_training(tmp_path):
    callback = guard_callback(watch=iter(["activations", "gradients"]))
    for _ in range(2):
        fit(tmp_path, callback)
        assert callback.guard.coverage().steps == 3
