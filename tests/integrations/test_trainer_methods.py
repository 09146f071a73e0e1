"""Methods of trainers that callbacks replace, and put back."""

import copy
import types

import pytest
import torch
from guarding import NAN, hooks_of
from lightning_fits import (
    Hooks,
    Lit,
    data,
    fit,
    guard_callback,
    left_behind,
    make_trainer,
)
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard

pytestmark = [
    pytest.mark.xdist_group("lightning"),
    pytest.mark.filterwarnings("ignore"),
]

accelerate = pytest.importorskip("accelerate")


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
    from overflow_fast.integrations.patched_methods import PatchedMethod

    class Owner:
        def method(self, x, *, y=1):
            """Adds."""
            return x + y

    owner = Owner()
    refused = []
    stand_in = PatchedMethod(owner, "method", lambda x, **_: x > 0 or refused.append(x))
    assert owner.method(1, y=2) == 3
    assert owner.method.__code__ is Owner.method.__code__
    assert owner.method.__doc__ != "" and owner.method.__name__ == "method"
    assert isinstance(copy.deepcopy(owner).method, types.MethodType)
    stand_in.remove()
    stand_in.remove()
    assert vars(owner) == {}
