"""A hook that meets trouble says so in its frame and lets the program go on."""

import pytest
import torch
from assembled import Assembled
from modes import Operators
from torch import nn

from overflow_fast import DebugUnderflowOverflow


class OwnParameters(Assembled):
    def named_parameters(self, *args, **kwargs):
        raise self.error

    def forward(self, x):
        return x


def test_a_module_that_cannot_be_walked_is_listed_as_not_scanned(as_kept):
    model = OwnParameters(error=RuntimeError("no way\nat all"))
    detector = DebugUnderflowOverflow(model)
    model(torch.ones(2))
    as_kept(detector.frames[-1].splitlines()[-3:])


def test_an_interrupt_inside_a_hook_is_the_users():
    model = OwnParameters(error=KeyboardInterrupt())
    DebugUnderflowOverflow(model)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2))
    model.error = RuntimeError()
    assert torch.equal(model(torch.ones(2)), torch.ones(2))


class Broken(torch.Tensor):
    """A wrapper whose values cannot be had."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2,))

    @property
    def _local_tensor(self):
        raise RuntimeError("nothing here")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("not this one")


def test_a_tensor_that_cannot_be_read_is_listed_as_not_scanned(as_kept):
    model = nn.Identity()
    detector = DebugUnderflowOverflow(model)
    model(Broken())
    as_kept(detector.frames[-1])


@pytest.mark.parametrize("defer", [False, True])
def test_no_mode_of_the_user_sees_the_scan(defer):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with Operators() as bare:
        model(torch.ones(1, 2))
    DebugUnderflowOverflow(model, _defer=defer)
    with Operators() as watched:
        model(torch.ones(1, 2))
    assert watched.seen == bare.seen
