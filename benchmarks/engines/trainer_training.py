"""A training whose loop is transformers' Trainer's; see engine_runs.py."""

import dataclasses
from typing import Any

import torch
from engine_runs import BAD, Training
from torch.utils.data import SequentialSampler
from transformers import TrainerCallback

from overflow_fast.integrations.trainer import TrainerGuardCallback


@dataclasses.dataclass
class TrainerTraining(Training):
    """The Trainer makes the steps, and its callback the guard.

    Attributes:
        trainer: The Trainer, of a class made by `in_order()`.
    """

    trainer: Any = None

    def train(self, case, losses, after_step):
        self.trainer.losses = losses
        self.trainer.add_callback(AfterStep(case, after_step))
        self.trainer.train()

    @classmethod
    def of(cls, trainer, model, state, facts):
        def make_guard(**options):
            callback = TrainerGuardCallback(**options)
            trainer.add_callback(callback)
            return callback

        return cls(model, make_guard, None, state, facts, trainer=trainer)


class AfterStep(TrainerCallback):
    """Calls a function after each step, twice where a case leaves the next one out."""

    def __init__(self, case, function):
        self.case = case
        self.function = function

    def on_step_begin(self, args, state, control, **kwargs):
        is_behind = self.case.fault == "left out" and state.global_step >= BAD
        torch.manual_seed(state.global_step + is_behind)  # of what a step samples

    def on_step_end(self, args, state, control, **kwargs):
        self.function()
        if self.case.fault == "left out" and state.global_step == BAD:
            self.function()


def in_order(cls, deals=True):
    """Makes a class of Trainers that take their samples in order and keep losses.

    Args:
        cls: The class.
        deals: False if it takes them in order by itself.
    """

    class Run(cls):
        def _get_train_sampler(self, *args):
            if not deals:
                return super()._get_train_sampler(*args)
            return SequentialSampler(self.train_dataset)

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.losses.append(loss.item())
            return loss

    return Run


# A schedule that DeepSpeed's Trainer keeps, in which a pause shows.
SCHEDULE = {
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 20,
    "learning_rate": 1e-2,
}
QUIET = {
    "report_to": [],
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
}
