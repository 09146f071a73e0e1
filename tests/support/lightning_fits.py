"""Fits by Lightning's Trainer, small and quiet."""

import pytest
import torch
from torch import nn

lightning = pytest.importorskip("lightning.pytorch")

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
    from overflow_fast.integrations.lightning import LightningGuardCallback

    return LightningGuardCallback(**arguments)


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


# transformers.


class NumberOfSteps:
    """An exporter that keeps the steps' numbers."""

    def __init__(self):
        self.steps = []

    def __call__(self, step, values):
        self.steps.append(step)
