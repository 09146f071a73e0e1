"""Explanations of batches and outputs that are in containers."""

import datetime

import pytest
import torch
from assembled import Assembled
from containers import CONTAINERS, FEW
from guarding import report_from
from torch import nn

from overflow_fast import OverflowGuard

pytestmark = pytest.mark.usefixtures("untried")
KINDS = pytest.mark.parametrize("kind", FEW)
NAN = float("nan")


class Taking(nn.Module):
    """Takes a batch."""

    def __init__(self, kind):
        super().__init__()
        self.lin = nn.Linear(4, 1)
        self.container = CONTAINERS[kind]

    def forward(self, batch):
        return self.lin(self.container.get(batch)).sum()


class Log(nn.Module):
    def forward(self, x):
        return torch.log(x * 0 - 1)


class Undefined(nn.Module):
    """Returns a nan in a container, and nothing else."""

    def __init__(self, kind):
        super().__init__()
        self.lin, self.log = nn.Linear(4, 4), Log()
        self.container = CONTAINERS[kind]

    def forward(self, x):
        return self.container.make(self.log(self.lin(x)))


def stopped(model, step, is_run=False):
    """The explanation of a step that the guard stops."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer) as guard:
        (guard.run(step) if is_run else step()).backward()
        return report_from(optimizer.step).explanation


@KINDS
def test_a_bad_output_is_explained(kind):
    model = Undefined(kind)
    x = torch.randn(3, 4)
    found = stopped(model, lambda: CONTAINERS[kind].get(model(x)).sum())
    assert (found.cause, found.op.name) == ("undefined", "aten.log")
    assert "torch.log" in found.op.code


@KINDS
@pytest.mark.parametrize("is_read_by_a_function", [False, True])
def test_a_bad_sample_of_a_batch_is_named(kind, is_read_by_a_function):
    x = torch.randn(8, 4)
    x[5, 2] = NAN
    batch, model = CONTAINERS[kind].make(x), Taking(kind)
    found = stopped(model, lambda: model(batch), is_read_by_a_function)
    assert (found.cause, found.tensor) == ("bad data", f"batch{CONTAINERS[kind].path}")
    assert found.sample == 5


@KINDS
def test_a_sample_that_fails_in_the_model_is_found_by_cutting(kind):
    class Dividing(Taking):
        def forward(self, batch):
            x = self.container.get(batch)
            return (self.lin(x) / x[:, :1]).sum()

    x = torch.rand(8, 4) + 1
    x[6, 0] = 0
    batch, model = CONTAINERS[kind].make(x), Dividing(kind)
    found = stopped(model, lambda: model(batch))
    assert found.op.name == "aten.div.Tensor"
    assert found.sample == 6
    assert CONTAINERS[kind].get(batch) is x  # the batch is as it was


def test_a_forward_that_writes_to_its_batch_is_replayed_with_what_it_got():
    class Writing(Assembled):
        def forward(self, batch):
            batch.x = batch.x - 1
            batch.extra.pop()
            return torch.log(self.lin(batch.x).abs() * 0 + batch.x.min()).sum()

    batch = CONTAINERS["namespace"].make(torch.full((3, 4), 1.0))
    batch.extra = [torch.ones(1)]
    model = Writing(lin=nn.Linear(4, 1))
    found = stopped(model, lambda: model(batch))
    assert (found.cause, found.op.name) == ("undefined", "aten.log")
    assert found.op.inputs[0].abs_max == 0


def test_a_batch_that_cannot_be_cut_is_said():
    class Day(datetime.date):
        pass

    class Dividing(Assembled):
        def forward(self, batch):
            return (self.lin(batch.x) / batch.x[:, :1]).sum()

    batch = Day(2024, 1, 1)
    batch.x = torch.rand(8, 4) + 1
    batch.x[6, 0] = 0
    model = Dividing(lin=nn.Linear(4, 1))
    found = stopped(model, lambda: model(batch))
    assert found.op.name == "aten.div.Tensor"
    assert found.sample is None
    assert any("cannot rebuild" in note and "Day" in note for note in found.notes)


def test_an_object_that_leads_to_a_model_is_no_batch():
    class Trainer:
        def __init__(self, model):
            self.model = model
            self.x = torch.randn(8, 4)

    model = nn.Linear(4, 1)
    trainer, target = Trainer(model), torch.randn(8, 1)
    target[3] = NAN
    step = lambda: (trainer.model(trainer.x) - target).sum()  # noqa: E731
    found = stopped(model, step, is_run=True)
    assert (found.cause, found.tensor, found.sample) == ("bad data", "target", 3)


def test_a_sample_where_the_labels_of_all_are_in_one_row():
    """They leave open the size of no other tensor."""
    x = torch.ones(6, 4)
    x[2] = NAN
    labels, lengths, model = torch.ones(12), torch.full((6,), 2), nn.Linear(4, 1)

    def loss():
        return (model(x)[:, 0] * lengths).sum() - labels.mean()

    found = stopped(model, loss, is_run=True)
    assert (found.cause, found.sample, found.num_samples) == ("bad data", 2, 6)
