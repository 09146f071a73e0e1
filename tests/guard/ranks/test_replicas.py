"""Replicas of weights are compared bit for bit, and the odd rank is named."""

import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import device
from sharded_models import data, ddp, fsdp2, make
from torch import nn

from overflow_fast.guard.monitors.replica_check import ReplicaCheck

pytestmark = pytest.mark.filterwarnings("ignore")


def flip(tensor):
    with torch.no_grad():
        tensor.view(torch.int32).flatten()[0] ^= 1


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x, y = data(1)[0]
    model(x, y=y)["loss"].backward()
    optimizer.step()
    return optimizer


def found_on(model, optimizer):
    found = ReplicaCheck({"": model}, [optimizer]).differences()
    return [(each.name, each.ranks, each.group) for each in found]


def under_ddp():
    model = ddp(make())
    optimizer = trained(model)
    parameter = next(model.parameters())
    found = [found_on(model, optimizer)]
    if dist.get_rank() == 2:
        flip(parameter.data)
    found.append(found_on(model, optimizer))
    dist.broadcast(parameter.data, 0)
    if dist.get_rank() == 1:
        flip(optimizer.state[parameter]["exp_avg"])
    found.append(found_on(model, optimizer))
    if dist.get_rank() < 2:
        flip(parameter.data)
    return [*found, found_on(model, optimizer)[0]]


def under_hsdp():
    """Two replicas of two shards each; a single process in no group has none."""
    mesh = dist.device_mesh.init_device_mesh(
        device().type, (2, 2), mesh_dim_names=("replicate", "shard")
    )
    model = fsdp2(make(), mesh)
    optimizer = trained(model)
    clean = found_on(model, optimizer)
    if dist.get_rank() == 3:
        flip(
            next(p for p in model.parameters() if p._local_tensor.numel())._local_tensor
        )
    sharded = nn.Sequential(make())
    return clean, found_on(model, optimizer), found_on(sharded, optimizer)


def both():
    return under_ddp(), under_hsdp()


def test_the_odd_rank_is_named():
    results = ranks.on_ranks(4, both)
    for rank, ((clean, weight, state, tie), (whole, shard, alone)) in enumerate(
        results
    ):
        assert clean == whole == alone == []
        everyone = [0, 1, 2, 3]
        ((name, odd, group),) = weight
        assert (odd, group) == ([2], everyone) and "weight" in name
        ((name, odd, group),) = state
        assert (odd, group) == ([1], everyone) and name.endswith("(exp_avg)")
        assert tie[1:] == ([], everyone)  # two against two
        pair = [0, 2] if rank in (0, 2) else [1, 3]
        assert [each[1:] for each in shard] == ([] if rank in (0, 2) else [([], pair)])


def third_of_a_sequence():
    model = ddp(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    if dist.get_rank() == 1:
        flip(model.module[2].weight.data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = ReplicaCheck({"": model, "second.": model}, [optimizer]).differences()
    return [each.name for each in found]


def test_a_difference_is_named_as_the_model_names_it():
    assert (
        ranks.on_ranks(2, third_of_a_sequence) == [["2.weight", "second.2.weight"]] * 2
    )
