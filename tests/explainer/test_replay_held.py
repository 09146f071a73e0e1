"""A loss outside of the model, which was not given: backward begins at the output."""

import random

import pytest
import torch
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.guard.kept_calls import kept_call


class Root(nn.Module):
    def forward(self, x):
        return x + 0 * (x * 0).abs().sqrt()


def explained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Root(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    OverflowGuard(model, optimizer)
    # Its lines draw other numbers if they are run again.
    output = model(torch.tensor([[random.random() for _ in range(4)]] * 3))
    (output - 1).pow(2).mean().backward()
    with pytest.raises(NonFiniteError) as error:
        optimizer.step()
    return error.value.report.explanation


def test_backward_is_replayed_from_the_gradient_of_the_output():
    found = explained()
    assert (found.phase, found.cause) == ("backward", "singular gradient")
    assert (found.op.name, found.module) == ("aten.sqrt", "1")


def test_a_gradient_that_is_too_large_is_not_held(monkeypatch, as_kept):
    monkeypatch.setattr(kept_call, "_MAX_HELD_BYTES", 11)  # the output has 12
    found = explained()
    assert (found.phase, found.cause, found.op) == ("backward", "unknown", None)
    as_kept(found.notes)


def test_the_largest_gradient_that_is_held():
    assert kept_call._MAX_HELD_BYTES == 64 * 2**20  # as the guide says


def test_a_gradient_is_held_by_reference():
    model = nn.Linear(4, 2)
    guard = OverflowGuard(model)
    output = model(torch.randn(3, 4))
    gradient = torch.randn(3, 2)
    output.backward(gradient)
    (held,) = guard._parts.keeper.calls[0].held.values()
    assert held.data_ptr() == gradient.data_ptr()


@pytest.mark.day
@pytest.mark.parametrize("largest", [0, 2**20])
def test_a_call_awaits_its_backward_unless_no_gradient_is_held(largest, monkeypatch):
    monkeypatch.setattr(kept_call, "_MAX_HELD_BYTES", largest)
    model = nn.Linear(4, 2)
    guard = OverflowGuard(model)
    output = model(torch.randn(3, 4))
    (call,) = guard._parts.keeper.calls
    assert call.awaits_backward == (largest > 0)
    output.sum().backward()
    assert not call.awaits_backward


def test_a_forward_without_autograd_within_another_does_not_end_that_one():
    class Student(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                teacher(x)
            return super().forward(x)

    teacher, student = nn.Linear(3, 3), Student(3, 3)
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-3)
    with OverflowGuard({"student": student, "teacher": teacher}, optimizer) as guard:
        output = student(torch.ones(2, 3))
        (call,) = guard._parts.keeper.calls
        assert call.outputs[0].tensor() is output


class Deviation(nn.Module):
    def forward(self, x):
        return torch.cat([x, x.std(0).mean().expand(len(x), 1)], 1)


@pytest.mark.tries_remedies
@pytest.mark.filterwarnings("ignore:std")
def test_a_forward_whose_gradient_is_differentiated_is_not_the_whole_of_a_remedy():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Deviation(), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    OverflowGuard(model, optimizer)
    x = torch.ones(1, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (gradient.norm() - 1).square().backward()
    with pytest.raises(NonFiniteError) as error:
        optimizer.step()
    found = error.value.report.explanation
    assert found.cause == "empty reduction"
    helping = [each for each in found.remedies if each.is_recommended]
    assert helping and all(each.loss is not None for each in helping), found
