"""Code that a replay would disturb: it is left alone, or said."""

import numpy
import pytest
import torch
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.guard.report.findings import OVERWRITTEN
from overflow_fast.options import Explain

INF = float("inf")


class Writes(nn.Module):
    """Writes to its input, and draws from a source of its own."""

    def __init__(self, source=None, in_place=True):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.source = source
        self.in_place = in_place

    def forward(self, x):
        if self.source is not None:
            next(self.source)
        if self.in_place:
            x.mul_(2.0)
        return self.linear(x).mean().log()


def explained(model, x, replay_safe=True, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    explain = Explain("always", replay_safe=replay_safe)
    guard = OverflowGuard(model, optimizer, explain=explain, **options)
    with torch.no_grad():
        model.linear.bias.fill_(-100.0)
    with pytest.raises(NonFiniteError) as error:
        guard.run(lambda: model(x)).backward()
        optimizer.step()
    guard.remove()
    return error.value.report


def test_a_batch_that_the_forward_writes_to_is_written_to_once():
    x = torch.ones(3, 4)
    report = explained(Writes(), x)
    assert torch.equal(x, torch.full((3, 4), 2.0))
    assert report.explanation.cause == "undefined"
    assert OVERWRITTEN in report.explanation.notes


def test_writes_through_numpy_are_seen():
    values = numpy.ones((3, 4), dtype=numpy.float32)
    model = Writes(in_place=False)
    model.register_forward_hook(lambda *_: values.fill(5.0))
    report = explained(model, torch.from_numpy(values))
    assert OVERWRITTEN in report.explanation.notes


@pytest.mark.parametrize("watch", ["tripwire", ("activations", "loss", "gradients")])
def test_what_must_not_run_twice_runs_once(watch, as_kept):
    source = iter(range(10))
    report = explained(
        Writes(source, False), torch.ones(3, 4), replay_safe=False, watch=watch
    )
    assert next(source) == 1
    as_kept(report.explanation.notes)


def test_weights_are_explained_without_a_replay():
    model = Writes(in_place=False)
    with torch.no_grad():
        model.linear.weight[0, 1] = INF
    report = explained(model, torch.ones(3, 4), replay_safe=False)
    assert report.explanation.cause == "bad weights"
    assert report.explanation.replays == 0


def test_it_has_to_be_a_bool(as_kept):
    with pytest.raises(TypeError) as raised:
        OverflowGuard(nn.Linear(1, 1), explain=Explain(replay_safe=1))
    as_kept(raised.value)
