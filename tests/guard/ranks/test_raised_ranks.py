"""A rank whose own code raises: its exception has the report; it waits for nobody."""

import pytest
import torch
import torch.distributed as dist
from guarding import batches, make
from ranks import on_ranks
from torch.distributions import Normal
from torch.nn.parallel import DistributedDataParallel

from overflow_fast import OverflowGuard

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]


def _own_check(loss):
    if not loss.isfinite():
        raise FloatingPointError("my own check")


def _distribution(loss):
    Normal(loss - loss.detach(), 1.0, validate_args=True)


def _decomposition(loss):
    torch.linalg.cholesky((loss - loss.detach()) + torch.eye(2))


HEADS = {
    "own check": (_own_check, FloatingPointError),
    "distribution": (_distribution, ValueError),
    "decomposition": (_decomposition, torch.linalg.LinAlgError),
}


def _train(wrapped, name):
    """What each rank's exception holds, where the batches of both are bad in step 1."""
    head, kind = HEADS[name]
    model, optimizer = make()
    net = DistributedDataParallel(model) if wrapped else model
    group = None if wrapped else dist.group.WORLD
    guard = OverflowGuard(net, optimizer, "skip", process_group=group)
    data = batches(3)
    data[1][0].fill_(3e38)

    def loss_of(x, y):
        out = net(x, y=y)
        if dist.get_rank() == 1:
            head(out["loss"])
        return out["loss"]

    try:
        for x, y in data:
            loss = guard.run(lambda x=x, y=y: loss_of(x, y))
            if guard.step == 1:
                break  # the other rank has raised: no collective from here on
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except kind as error:
        report = guard.last_report
        notes = report.explanation.notes
        return type(error).__name__, report.step, report.raised, report.moment, notes
    return None


@pytest.mark.parametrize(
    ("wrapped", "name"),
    [
        pytest.param(True, "own check", marks=pytest.mark.day),
        (False, "own check"),
        *((True, "distribution"), (True, "decomposition")),
    ],
)
@pytest.mark.explains
def test_a_rank_that_raises_is_reported_and_replays_nothing(wrapped, name):
    first, second = on_ranks(2, _train, wrapped, name)
    assert first is None
    own, step, raised, moment, notes = second
    assert (raised, moment) == (own, "raised") and step == 1
    assert any("not replayed" in note for note in notes)
