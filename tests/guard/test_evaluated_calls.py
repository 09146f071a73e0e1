"""Forwards without autograd in a training: what is bad in one is run again."""

import gc
import weakref

import pytest
import torch
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard

pytestmark = pytest.mark.explains


class Scaled(nn.Module):
    """Divides by a deviation that it tracks."""

    def __init__(self):
        super().__init__()
        self.register_buffer("square", torch.ones(3))
        self.count = 0
        self.layer = nn.Linear(3, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        self.count += 1
        self.square.mul_(0.5).add_(x.square().mean(0), alpha=0.5)
        return self.layer(self.drop(x) / self.square.sqrt())


def made(policy="raise", **options):
    torch.manual_seed(0)
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = OverflowGuard(model, optimizer, policy, **options)
    guard.run(lambda: model(torch.ones(4, 3)).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, guard


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_the_operation_is_named_and_a_remedy_is_found(without):
    model, _, guard = made()
    with guard, pytest.raises(NonFiniteError) as error, without():
        model.square.fill_(-1.0)
        model(torch.ones(4, 3) * 0.1)
    found = error.value.report.explanation
    assert found.op.name == "aten.sqrt" and found.cause == "undefined"
    assert "self.square.sqrt()" in found.op.code
    assert "in a forward without autograd" in str(error.value)
    assert any(each.is_finite for each in found.remedies)


def test_the_program_goes_on_as_without_a_guard():
    ends = []
    for explain in (False, True):
        model, _, guard = made("warn", explain=explain)
        with guard, torch.no_grad():
            model.square.fill_(-1.0)
            output = model(torch.ones(4, 3) * 0.1)
            ends.append([output, model.square.clone(), torch.rand(2)])
        assert model.count == 2
        assert (guard.last_report.explanation is not None) == explain
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other) or one.isnan().all()


def test_a_batch_is_let_go_of_once_it_is_judged():
    model, _, guard = made()
    x = torch.ones(4, 3)
    gone = weakref.ref(x)
    with guard:
        with torch.no_grad():
            model(x)
        del x
        gc.collect()
        assert gone() is None


def test_a_part_that_is_called_alone_is_not_run_again():
    model, _, guard = made()
    with torch.no_grad():
        model(torch.ones(4, 3))
        with guard, pytest.raises(NonFiniteError) as error:
            model.layer(torch.full((4, 3), float("nan")))
    assert "not replayed: it ran without autograd" in str(error.value)
