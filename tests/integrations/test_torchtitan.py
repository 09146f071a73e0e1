"""torchtitan's Trainer under a guard, by a small Trainer that steps as it does."""

import pytest
import torch
from torch import nn

from overflow_fast import NonFiniteError
from overflow_fast.integrations.torchtitan import guard_with

BAD = 4  # torchtitan counts from 1


class Schedules:
    def __init__(self):
        self.num_steps = 0

    def step(self):
        self.num_steps += 1


class Trainer:
    """Calls its parts as torchtitan 0.3.0 does, and checks the loss of some steps."""

    def __init__(self, error="Loss is not finite (global_avg_loss=nan) at step 4."):
        self.model_parts = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))]
        weights = self.model_parts[0].parameters()
        self.optimizers = torch.optim.SGD(weights, 0.1)
        self.lr_schedulers = Schedules()
        self.step = 0
        self.error = error

    def train_step(self, batches):
        self.optimizers.zero_grad()
        loss = self.model_parts[0](next(batches)).square().mean()
        loss.backward()
        self.optimizers.step()
        self.lr_schedulers.step()
        if not loss.isfinite():
            raise RuntimeError(self.error)

    def train(self, num_steps=6):
        batches = iter(self.batches())
        for _ in range(num_steps):
            self.step += 1
            self.train_step(batches)

    def batches(self):
        while True:
            yield torch.full((2, 4), float("nan") if self.step == BAD else 1.0)


def test_a_skipped_step_pauses_the_schedule_and_goes_on():
    trainer = Trainer()
    guard = guard_with(trainer, on_overflow="skip")
    trainer.train()
    assert (guard.num_skipped, guard.last_report.step) == (1, BAD)
    assert trainer.lr_schedulers.num_steps == 5
    assert guard.step == 7


def test_a_raised_step_steps_no_schedule():
    trainer = Trainer()
    guard_with(trainer)
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    assert caught.value.report.step == BAD
    assert trainer.lr_schedulers.num_steps == 3


@pytest.mark.parametrize(
    "error, policy", [("Loss is not finite", "warn"), ("CUDA error", "skip")]
)
def test_errors_of_other_steps_and_kinds_end_the_training(error, policy):
    trainer = Trainer(error)
    guard_with(trainer, on_overflow=policy)
    with pytest.raises(RuntimeError, match=error):
        trainer.train()


def test_steps_have_the_numbers_of_a_checkpoint():
    trainer = Trainer()
    guard = guard_with(trainer)
    trainer.step = 100  # loaded when training begins
    trainer.train(2)
    assert guard.step == 103


def test_a_guard_that_is_removed_leaves_nothing():
    trainer = Trainer()
    before = set(vars(trainer)), set(vars(trainer.lr_schedulers))
    guard_with(trainer).remove()
    assert (set(vars(trainer)), set(vars(trainer.lr_schedulers))) == before
    trainer.train(2)


def test_a_guard_that_is_switched_off_pauses_nothing():
    trainer = Trainer()
    guard = guard_with(trainer, on_overflow="skip")
    trainer.train(BAD)
    guard.disable()
    trainer.train(2)
    assert trainer.lr_schedulers.num_steps == 5


def test_another_object_is_refused(as_kept):
    as_kept.error(TypeError, guard_with, nn.Linear(2, 2))
