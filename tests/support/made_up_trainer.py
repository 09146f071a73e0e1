"""A trainer of a framework that overflow_fast does not know, with callbacks."""

import torch
from torch import nn


class MadeUpTrainer:
    """Trains a model on batches, and evaluates it behind each.

    Args:
        model: The model; a batch holds its input, "x".
        callbacks: Called at the events of their methods' names. One of them computes
            the loss.
        validated: Batches that are evaluated behind each step.
        fails_at: The step between whose loss and backward it raises.
    """

    def __init__(self, model, callbacks, validated=(), fails_at=None):
        self.models, self.callbacks = {"model": model}, callbacks
        self.validated, self.fails_at = validated, fails_at
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.step, self.saved = 0, []

    def fit(self, batches):
        """Makes a step of each batch."""
        self._call("on_train_begin")
        try:
            for batch in batches:
                self._call("on_batch_begin", batch)
                self.train_on(batch)
                self._call("on_batch_end")
                self.step += 1
                self.evaluate()
            self._call("on_save")
            self.saved.append(self.step)
        except Exception as error:
            self._call("on_exception", error)
            raise
        finally:
            self._call("on_train_end")

    def train_on(self, batch):
        """Computes the loss, and steps."""
        (loss,) = self._call("compute_loss", batch)
        if self.step == self.fails_at:
            raise ValueError("constraint")
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def training_step(self, batch):
        """The loss of a batch."""
        return loss_of(self.models["model"], batch)

    @torch.no_grad()
    def evaluate(self):
        """Runs the model on what it is validated with."""
        for i, batch in enumerate(self.validated):
            self._call("on_evaluation_batch_begin", i)
            self.models["model"](batch["x"])
            self._call("on_evaluation_batch_end")

    def _call(self, event, *args):
        methods = (getattr(each, event) for each in self.callbacks)
        return [method(self, *args) for method in methods]


def loss_of(model, batch):
    """The mean of the squares of what a model returns for a batch."""
    return model(batch["x"]).square().mean()


def two_layers():
    """A model, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
