"""What a run again has changed is restored; what cannot be is named."""

import numpy
import pytest
import torch
from failed_runs import failed
from torch import nn

from overflow_fast.explainer.snapshot import Snapshot

pytestmark = pytest.mark.explains


def test_a_wrapper_has_its_attributes_again():
    """It has the name of what it wraps."""

    class DistributedDataParallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module, self.number, self.items = module, 0, []

        def forward(self, x):
            self.number += 1
            self.items.append(1)
            return self.module(x)

    DistributedDataParallel.__module__ = "torch.nn.parallel.distributed"
    model = DistributedDataParallel(nn.Linear(4, 1))
    with Snapshot({"": model}):
        model(torch.ones(1, 4))
    assert model.number == 0 and model.items == []


class Replacing(nn.Module):
    """Holds what a forward must not lose or break: other weights, nested tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])

    def forward(self, x):
        y = self.linear(x).sum() * 0 / (self.nested.values().sum() - 3)
        self.linear.weight = nn.Parameter(self.linear.weight.detach() + 1)
        self.nested.mul_(2)
        return y


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_weight_that_the_forward_has_replaced_is_in_its_place_again(policy):
    model = Replacing()
    weight = model.linear.weight
    failed(model, lambda: model(torch.ones(3, 4)), policy)
    assert model.linear.weight is weight


def test_a_replay_leaves_nested_tensors_as_they_are():
    model = Replacing()
    with Snapshot({"": model}) as state:
        model(torch.ones(3, 4))
    assert state.problems == []
    assert model.nested.values().tolist() == [1, 1, 1]


def test_what_cannot_be_restored_does_not_stop_the_rest():
    model = nn.Linear(4, 4)
    model.array, model.items = numpy.zeros(2), []
    with Snapshot({"": model}) as state:
        model.array[0] = 1
        model.array.flags.writeable = False
        model.items.append(1)
    assert model.items == []
    assert len(state.problems) == 1 and "array" in state.problems[0]
