"""What the guard leaves of a trainer: methods, pickles, numbers, what is logged."""

import copy
import pickle
import types

import pytest
import torch
from guarding import INF, NAN, hooks_of
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard

accelerate = pytest.importorskip("accelerate")
lightning = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings("ignore")

QUIET = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Lit(lightning.LightningModule):
    """A layer and a parameter of its own; batches are numbers that it multiplies."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.scale = nn.Parameter(torch.ones(1))

    def training_step(self, batch, index):
        return (self.layer(batch) * self.scale).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Hooks(lightning.Callback):
    """Calls functions of the trainer and the module in the hooks of their names."""

    def __init__(self, **functions):
        for name, function in functions.items():
            setattr(self, name, self._hook(function))

    def __getstate__(self):
        return {}

    @staticmethod
    def _hook(function):
        return lambda trainer, module, *args, **kwargs: function(trainer, module)


def guard_callback(**arguments):
    from overflow_fast.integrations.lightning import GuardCallback

    return GuardCallback(**arguments)


def data(count=3):
    torch.manual_seed(0)
    return torch.utils.data.DataLoader(list(torch.randn(count, 2)))


def make_trainer(tmp_path, *callbacks, **arguments):
    arguments = {**QUIET, "default_root_dir": tmp_path, **arguments}
    return lightning.Trainer(callbacks=list(callbacks), **arguments)


def fit(tmp_path, *callbacks, module=None, count=3, ckpt_path=None, **arguments):
    trainer = make_trainer(tmp_path, *callbacks, **arguments)
    module = Lit() if module is None else module
    trainer.fit(module, data(count), ckpt_path=ckpt_path)
    return trainer, module


PATCHED = ("save_checkpoint", "lr_scheduler_step", "backward")


def left_behind(trainer, module):
    owners = (trainer, module, trainer.strategy)
    return [name for each in owners for name in PATCHED if name in vars(each)]


# What was there is put back.


class StopIt(Exception):
    pass


@pytest.mark.parametrize("error", [None, StopIt, SystemExit])
def test_a_users_own_methods_are_put_back(tmp_path, error):
    saves, schedules = [], []

    def end(trainer, module):
        trainer.save_checkpoint("any")
        module.lr_scheduler_step(None, None)
        if error is not None:
            raise error

    trainer = make_trainer(tmp_path, guard_callback(), Hooks(on_train_batch_end=end))
    module = Lit()
    save = trainer.save_checkpoint = lambda path: saves.append(path)
    schedule = module.lr_scheduler_step = lambda *args: schedules.append(args)
    if error is None:
        trainer.fit(module, data())
    else:
        with pytest.raises(error):
            trainer.fit(module, data())
    assert vars(trainer)["save_checkpoint"] is save
    assert vars(module)["lr_scheduler_step"] is schedule
    assert len(saves) == len(schedules) == (3 if error is None else 1)
    assert "backward" not in vars(trainer.strategy)


def test_overridden_methods_are_called_and_not_replaced(tmp_path):
    class Own(Lit):
        calls = 0

        def lr_scheduler_step(self, scheduler, metric):
            Own.calls += 1
            scheduler.step()

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    trainer, module = fit(tmp_path, guard_callback(), module=Own())
    assert Own.calls == 1
    assert left_behind(trainer, module) == []


@pytest.mark.parametrize("has_own", [False, True])
def test_several_callbacks_put_back_what_was_there(tmp_path, has_own):
    module = Lit()
    if has_own:
        module.lr_scheduler_step = own = lambda *args: None
    trainer, _ = fit(tmp_path, guard_callback(), guard_callback(), module=module)
    assert left_behind(trainer, module) == ["lr_scheduler_step"] * has_own
    assert not has_own or module.lr_scheduler_step is own


def test_what_others_put_there_meanwhile_stays(tmp_path):
    calls = []

    def patch(trainer, module):
        guarded = trainer.save_checkpoint

        def theirs(path):
            calls.append(path)
            return guarded(path)

        trainer.save_checkpoint = theirs

    trainer, module = fit(tmp_path, guard_callback(), Hooks(on_train_start=patch))
    theirs = vars(trainer)["save_checkpoint"]
    module.layer.weight.data.fill_(NAN)
    trainer.save_checkpoint(tmp_path / "a.ckpt")  # the guard is off
    assert calls == [tmp_path / "a.ckpt"] and calls[0].exists()
    trainer.fit_loop.max_epochs = 2
    module.layer.weight.data.fill_(0.5)
    trainer.fit(module, data())
    assert vars(trainer)["save_checkpoint"].__closure__ is not None
    assert theirs is not None and left_behind(trainer, module) == ["save_checkpoint"]


def test_a_mock_of_a_method_counts_and_goes(tmp_path):
    from unittest import mock

    counts = []

    def count(trainer, module):
        trainer.save_checkpoint("any")
        counts.append(trainer.save_checkpoint.call_count)

    trainer = make_trainer(tmp_path, guard_callback(), Hooks(on_train_batch_end=count))
    with mock.patch.object(trainer, "save_checkpoint"):
        trainer.fit(Lit(), data())
    assert counts == [1, 2, 3]
    assert "save_checkpoint" not in vars(trainer)


def test_a_mock_of_an_optimizers_class_is_called_as_without_the_guard():
    from unittest import mock

    with mock.patch.object(torch.optim.SGD, "step") as step:
        layer = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(layer.parameters())
        with OverflowGuard(layer, optimizer, "skip"):
            optimizer.step()
            optimizer.step(closure=lambda: layer(torch.ones(1)))
    assert step.call_args_list == [mock.call(), mock.call(closure=mock.ANY)]


def test_a_fit_inside_of_a_fit_leaves_the_outer_one_guarded(tmp_path):
    callback = guard_callback(on_overflow="skip")
    guards = []

    def again(trainer, module):
        if trainer.global_step == 1:
            outer = callback.guard
            fit(tmp_path, callback)
            guards.extend([outer, callback.guard])

    trainer, module = fit(tmp_path, callback, Hooks(on_train_batch_end=again))
    assert guards[0] is guards[1] is callback.guard
    assert callback.guard.coverage().steps == 3
    assert left_behind(trainer, module) == [] and hooks_of(module) == 0


def test_evaluating_elsewhere_does_not_end_the_guard(tmp_path):
    callback = guard_callback()

    class Val(Lit):
        def validation_step(self, batch, index):
            self.layer(batch)

    def validate(trainer, module):
        other = make_trainer(tmp_path, callback)
        other.validate(Val(), data(), verbose=False)
        assert callback.guard.enabled

    fit(tmp_path, callback, Hooks(on_train_batch_end=validate))
    assert not callback.guard.enabled


def test_a_schedule_of_epochs_steps_where_the_last_step_was_skipped(tmp_path):
    class Scheduled(Lit):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            make = torch.optim.lr_scheduler.StepLR
            steps = {"scheduler": make(optimizer, 1), "interval": "step"}
            return [optimizer], [{"scheduler": make(optimizer, 1)}, steps]

        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            return loss * NAN if index == 2 else loss

    trainer, _ = fit(tmp_path, guard_callback(on_overflow="skip"), module=Scheduled())
    epochs, steps = (c.scheduler.last_epoch for c in trainer.lr_scheduler_configs)
    assert (epochs, steps) == (1, 2)


def test_accelerators_save_state_is_put_back(tmp_path):
    from overflow_fast.integrations.accelerate import guard_with

    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    first = guard_with(accelerator, model, optimizer)
    second = guard_with(accelerator, model, optimizer)
    first.remove()
    with pytest.raises(NonFiniteError), torch.no_grad():
        model.weight.fill_(NAN)
        accelerator.save_state(tmp_path)
    second.remove()
    assert "save_state" not in vars(accelerator)
    own = accelerator.save_state = lambda: "mine"
    with guard_with(accelerator, nn.Linear(2, 1), None):  # which is gone
        assert accelerator.save_state() == "mine"
    assert accelerator.save_state is own


# Pickles and copies.


def same_in_a_pickle(thing, tmp_path):
    torch.save(thing, tmp_path / "thing.pt")
    return torch.load(tmp_path / "thing.pt", weights_only=False)


@pytest.mark.parametrize("when", ["during", "after"])
def test_lightnings_objects_can_be_pickled_and_copied(tmp_path, when):
    copies = []

    def save(trainer, module):
        copies.append(same_in_a_pickle(trainer, tmp_path))
        for same in (same_in_a_pickle(module, tmp_path), copy.deepcopy(module)):
            assert same.lr_scheduler_step.__self__ is same
            assert same.lr_scheduler_step.__func__ is Lit.lr_scheduler_step
        copy.deepcopy(trainer.callbacks)

    callbacks = [guard_callback(on_overflow="skip", learn=2)]
    if when == "during":
        callbacks.append(Hooks(on_train_epoch_end=save))
    trainer, module = fit(tmp_path, *callbacks)
    if when == "after":
        save(trainer, module)
    assert trainer.callbacks[0].guard.coverage().steps == 3
    assert left_behind(trainer, module) == []
    callback = copies[0].callbacks[0]
    assert callback.guard is None
    fit(tmp_path, callback)
    assert callback.guard.coverage().steps == 3


def own_step(scheduler, metric):
    scheduler.step()


def test_a_users_own_method_is_in_the_pickle(tmp_path):
    copies = []

    def save(trainer, module):
        copies.append(same_in_a_pickle(module, tmp_path))

    module = Lit()
    module.lr_scheduler_step = own_step
    fit(tmp_path, guard_callback(), Hooks(on_train_end=save), module=module)
    assert copies[0].lr_scheduler_step is own_step


def test_copies_of_a_callback_share_what_it_was_given(tmp_path):
    from overflow_fast.integrations.lightning import GuardCallback

    class Own(GuardCallback):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            self.seen = []

    def export(step, values):
        callback.seen.append(step)

    callback = Own(metrics=export)
    fit(tmp_path, callback)
    same = copy.deepcopy(callback)
    assert same.seen == [0, 1, 2] and same.seen is not callback.seen
    assert same.guard is None
    fit(tmp_path, same)
    assert callback.seen == [0, 1, 2] * 2


def test_exporters_can_be_pickled(tmp_path, caplog):
    pytest.importorskip("tensorboard")
    pytest.importorskip("prometheus_client")
    from prometheus_client import CollectorRegistry

    from overflow_fast.integrations.prometheus import PrometheusMetrics
    from overflow_fast.integrations.tensorboard import TensorBoardMetrics

    exporters = [
        TensorBoardMetrics(tmp_path / "guard"),
        PrometheusMetrics(registry=CollectorRegistry()),
    ]
    callback = guard_callback(metrics=exporters)
    fit(tmp_path, callback)
    same = pickle.loads(pickle.dumps(callback))
    assert len(list((tmp_path / "guard").iterdir())) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.utils.tensorboard.writer.time.time", lambda: 7)
        fit(tmp_path, same)
    assert len(list((tmp_path / "guard").iterdir())) == 2
    assert "make one in the process that trains" in caplog.text
    pickle.loads(pickle.dumps(exporters[1])).close()


# Losses and what else is watched.


class Manual(Lit):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(2, 1)

    def training_step(self, batch, index):
        for optimizer, layer in zip(self.optimizers(), self.layers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(self.loss_of(layer(batch)))
            optimizer.step()

    def layers(self):
        return self.layer, self.other

    def loss_of(self, output):
        return output.mean()

    def configure_optimizers(self):
        return [torch.optim.SGD(each.parameters(), lr=0.1) for each in self.layers()]


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
def test_loggers_get_the_numbers_with_lightnings_own(tmp_path, module, arguments):
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
    with pytest.raises(TypeError, match="to_loggers must be a bool, got int"):
        guard_callback(to_loggers=1)


class NumberOfSteps:
    """An exporter that keeps the steps' numbers."""

    def __init__(self):
        self.steps = []

    def __call__(self, step, values):
        self.steps.append(step)


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
    [
        (Manual, {}, [0, 2, 4]),
        (Lit, {"accumulate_grad_batches": 2}, [0, 1]),
    ],
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


# transformers.


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
    from overflow_fast.integrations.trainer import GuardCallback

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
        callbacks = [GuardCallback(**arguments)]
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


# The clock.


@pytest.mark.parametrize("times", [[1.0, 2.0], [5.0, 4.0] + [0.0] * 99])
def test_the_clock_of_a_test_is_left_alone(times, monkeypatch):
    import time

    left = iter(times)
    monkeypatch.setattr(time, "perf_counter", lambda: next(left))
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with OverflowGuard(model, optimizer) as guard:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert list(left) == times
    assert guard.cost.step_seconds > guard.cost.guard_seconds > 0


def test_a_stand_in_is_what_it_stands_for():
    from overflow_fast.integrations.stand_in import StandIn

    class Owner:
        def method(self, x, *, y=1):
            """Adds."""
            return x + y

    owner = Owner()
    refused = []
    stand_in = StandIn(owner, "method", lambda x, **_: x > 0 or refused.append(x))
    assert owner.method(1, y=2) == 3
    assert owner.method.__code__ is Owner.method.__code__
    assert owner.method.__doc__ != "" and owner.method.__name__ == "method"
    assert isinstance(copy.deepcopy(owner).method, types.MethodType)
    stand_in.remove()
    stand_in.remove()
    assert vars(owner) == {}


# The batch, which the trainer alone knows.


class Stages(Lit):
    """Two layers that training_step() calls one by one."""

    def __init__(self, compute):
        super().__init__()
        self.compute = compute
        self.second = nn.Linear(2, 1)

    def training_step(self, batch, index):
        return self.compute(self, batch)


def two_roots(module, batch):
    module.layer(batch["x"])
    return module.second(batch["z"]).mean()


SAMPLE = ", sample 3 of 8 (from 0)"


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "compute, key, place",
    [
        (lambda m, b: m.layer(b["x"]).mean(), "x", "batch['x']"),
        (two_roots, "z", "batch['z']"),
        (lambda m, b: m.layer(b["more"][0]).mean(), "more", "batch['more'][0]"),
    ],
)
def test_the_batch_of_training_step_is_named(tmp_path, compute, key, place, value):
    verdict = verdict_of(tmp_path, compute, {key: value})
    assert verdict.source == "batch"
    (found,) = verdict.batch_places
    assert found.removesuffix(", which holds -inf") == f"`{place}`{SAMPLE}"


@pytest.mark.parametrize(
    "compute",
    [
        lambda m, b: m.layer(b["x"] / 0 * 0).mean(),
        lambda m, b: m.layer(b["x"].zero_().log() * 0).mean(),
        lambda m, b: m.second(b["x"] / (m.layer(b["x"]).std() * 0) * 0).mean(),
    ],
)
def test_what_training_step_computes_is_not_the_batchs(tmp_path, compute):
    verdict = verdict_of(tmp_path, compute, {})
    assert verdict.source != "batch" and verdict.batch_places == []
    assert "the training loop" in verdict.candidates


def test_a_part_of_the_batch_that_is_gone_is_unclear(tmp_path):
    verdict = verdict_of(
        tmp_path,
        lambda m, b: m.layer(b["x"][1:]).mean(),
        {"x": NAN},
        explain=False,  # which would keep it
    )
    assert verdict.source == "unclear"
    assert verdict.candidates == ["the batch", "the training loop"]
    assert verdict.remarks == [f"The batch is non-finite: `batch['x']`{SAMPLE}."]


def test_a_bad_label_is_pointed_out(tmp_path):
    def compute(module, batch):
        return (module.layer(batch["x"]) * batch["y"]).mean()

    verdict = verdict_of(tmp_path, compute, {"y": NAN})
    assert verdict.source == "loss"
    assert verdict.remarks == [f"The batch is non-finite: `batch['y']`{SAMPLE}."]


def verdict_of(tmp_path, compute, values, **options):
    """The verdict on one batch that holds values in sample 3."""
    shapes = {"x": (8, 2), "y": (8, 1), "z": (8, 2), "more": (8, 2)}
    batch = {name: torch.ones(shape) for name, shape in shapes.items()}
    for name, value in values.items():
        batch[name][3] = value
    batch |= {"more": [batch["more"]], "ids": [1, "two", None]}
    callback = guard_callback(on_overflow="skip", **options)
    trainer = make_trainer(tmp_path, callback)
    loader = torch.utils.data.DataLoader([batch], batch_size=None)
    trainer.fit(Stages(compute), loader)
    return callback.guard.last_report.verdict


def test_batches_are_told_apart_by_the_forwards_that_follow():
    from overflow_fast.recording.loop_batches import LoopBatch, LoopBatches

    tensors = [torch.full((2,), NAN), torch.ones(2)]
    bad, clean = map(LoopBatch, tensors)
    batches = LoopBatches()
    assert batches.of(0) is None
    batches.note(0, 0, bad)
    batches.note(1, 5, None)
    batches.note(1, 5, clean)
    assert batches.of(0) is bad and batches.of(1) is clean and batches.of(7) is clean
    batches.note(1, 9, bad)  # some of the calls were of the clean one
    assert batches.of(1) is None
    batches.note(1, 9, bad)
    assert batches.of(1) is None
    for number in range(20):
        batches.note(number, number, clean)
    assert len(batches._batches) <= 8


def test_a_batch_that_cannot_be_looked_at_is_unknown():
    from collections import UserDict

    from overflow_fast.recording.loop_batches import LoopBatch

    x = torch.ones(2)
    assert LoopBatch({"x": x, "n": 1, "ids": torch.ones(2).long()}).bad_places() == []
    gone = LoopBatch([x * NAN])
    assert gone.bad_places() is None
    kept = UserDict(x=x * NAN)
    assert LoopBatch(kept).bad_places() == ["`batch['x']`"]
    for unknown in (object(), x.to_sparse(), {"deep": [[[[[[x]]]]]]}):
        assert LoopBatch([x, unknown]).bad_places() is None
    written = LoopBatch([x])
    x.fill_(NAN)
    assert written.bad_places() is None and written.place_of(x) == ""
