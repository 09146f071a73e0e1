"""A rank whose own code raises: its exception has the report; it waits for nobody."""

import pytest
import torch.distributed as dist
from guarding import batches, make
from ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel

from overflow_fast import OverflowGuard

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]


def _train(wrapped):
    """What each rank's exception holds, where the batches of both are bad in step 1."""
    model, optimizer = make()
    net = DistributedDataParallel(model) if wrapped else model
    group = None if wrapped else dist.group.WORLD
    guard = OverflowGuard(net, optimizer, "skip", process_group=group)
    data = batches(3)
    data[1][0].fill_(3e38)

    def loss_of(x, y):
        out = net(x, y=y)
        if dist.get_rank() == 1 and not out["loss"].isfinite():
            raise FloatingPointError("my own check")
        return out["loss"]

    try:
        for x, y in data:
            loss = guard.run(lambda x=x, y=y: loss_of(x, y))
            if guard.step == 1:
                break  # the other rank has raised: no collective from here on
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except FloatingPointError as error:
        report = guard.last_report
        notes = report.explanation.notes
        return str(error), report.step, report.raised, report.moment, notes
    return None


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_rank_that_raises_is_reported_and_replays_nothing(wrapped):
    first, second = on_ranks(2, _train, wrapped)
    assert first is None
    text, step, raised, moment, notes = second
    assert (text, step) == ("my own check", 1)
    assert (raised, moment) == ("FloatingPointError", "raised")
    assert any("not replayed" in note for note in notes)
