"""Models that ranks share, and their batches: DDP, FSDP2, tensor parallelism."""

import contextlib
import logging

import torch
import torch.distributed as dist
from guarding import Block, batches
from ranks import device
from torch import nn

DEPTH = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(DEPTH))
        self.head = nn.Linear(8, 1)

    def forward(self, x, y=None):
        for block in self.blocks:
            x = block(x)
        out = self.head(x)
        return {"loss": ((out - y) ** 2).mean(), "out": out}


def make():
    torch.manual_seed(0)
    return Net().to(device())


def data(count=3):
    return [tuple(t.to(device()) for t in batch) for batch in batches(count)]


def ddp(model):
    ids = None if device().type == "cpu" else [device()]
    return nn.parallel.DistributedDataParallel(model, device_ids=ids)


def fsdp2(model, mesh=None):
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model, mesh=None):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = mesh or dist.device_mesh.init_device_mesh(
        device().type, (dist.get_world_size(),)
    )
    plan = {}
    for i in range(DEPTH):
        plan[f"blocks.{i}.fc1"] = ColwiseParallel()
        plan[f"blocks.{i}.fc2"] = RowwiseParallel()
    return parallelize_module(model, mesh, plan)


def sharded_in_two_ways(model):
    mesh = dist.device_mesh.init_device_mesh(
        device().type, (2, 2), mesh_dim_names=("dp", "tp")
    )
    return fsdp2(tensor_parallel(model, mesh["tp"]), mesh["dp"])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@contextlib.contextmanager
def logged():
    """The records that the package logs meanwhile."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("overflow_fast").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("overflow_fast").removeHandler(handler)
