"""Pickles and copies of trainers, callbacks and exporters."""

import copy

import pytest
import torch
from lightning_fits import Hooks, Lit, fit, guard_callback, left_behind

pytestmark = [
    pytest.mark.xdist_group("lightning"),
    pytest.mark.filterwarnings("ignore"),
]

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

    callbacks = [guard_callback(on_overflow="skip")]
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
    from overflow_fast.integrations.lightning import LightningGuardCallback

    class Own(LightningGuardCallback):
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
