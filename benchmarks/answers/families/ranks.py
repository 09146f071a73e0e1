"""Two processes with DistributedDataParallel; one of them is where it begins."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..failure import Chain, Fn, Run, failure, randn, rank, square

RANKS = dict(ranks=2, kind="ranks")


def parallel(model, **options):
    """The model under DDP, where there are processes."""
    if not dist.is_initialized():
        return model
    return DistributedDataParallel(model, **options)


@failure(
    "ecmwf/WeatherGenerator#2718",
    *("data", "bad data"),
    tensor="batch|input",
    sample=1,
    **RANKS,
)
def batch_of_one_rank(cured):
    """One rank alone reads a sample with a nan; after the reduction all ranks have it.
    Fill or drop such samples where the batch is made.
    """
    torch.manual_seed(0)
    model = parallel(Chain(body=nn.Linear(4, 4), act=nn.Tanh(), head=nn.Linear(4, 1)))

    def batch(step):
        x = randn(3, 4, seed=10 * step + rank())
        if rank() == 1 and step == 1 and not cured:
            x[1, 2] = torch.nan
        return x

    return Run(model, square, batch, 3)


@failure(
    "unslothai/unsloth-zoo#888",
    *("forward", "empty reduction", "aten.mean"),
    **RANKS,
)
def rank_without_a_token(cured):
    """One rank has a batch without a token that counts, and its mean is nan. Return 0
    there, or divide by the count of all ranks.
    """
    torch.manual_seed(1)
    model = parallel(Chain(embed=nn.Embedding(9, 4), head=nn.Linear(4, 9)))

    def loss(model, ids):
        logits = model(ids)
        wanted = logits.logsumexp(-1)[ids > 0]
        if cured and not len(wanted):
            return logits.sum() * 0
        return wanted.mean()  # <-

    def batch(step):
        return torch.ones(2, 5, dtype=torch.long) * (1 - rank())

    return Run(model, loss, batch)


@failure(
    "NovaSky-AI/SkyRL#1709",
    *("weights", "bad weights", "", "rotary"),
    tensor="rotary.inv_freq",
    **RANKS,
)
def buffer_that_other_ranks_lack(cured):
    """A buffer was filled on one rank only, and DDP was told not to broadcast buffers.
    Fill it on each rank.
    """

    def rotary(self, x):
        return x * (torch.arange(5.0)[:, None] * self.inv_freq).cos()

    torch.manual_seed(2)
    values = torch.ones(4)
    if rank() == 1 and not cured:
        values[:] = torch.nan
    rotary = Fn(rotary, inv_freq=values)
    model = Chain(embed=nn.Linear(4, 4), rotary=rotary, head=nn.Linear(4, 1))
    model = parallel(model, broadcast_buffers=False)
    return Run(model, square, lambda step: randn(3, 5, 4, seed=rank()))


@failure(
    "pytorch/pytorch#57410, pytorch/pytorch#59522",
    *("backward", "range overflow", "c10d.allreduce_"),
    **RANKS,
)
def gradients_that_are_added_in_half(cured):
    """A communication hook casts gradients to float16 and adds them before it divides:
    each is finite, their sum is not. Divide first, or reduce in bfloat16.
    """

    def add_first(state, bucket):
        half = bucket.buffer().to(torch.float32 if cured else torch.float16)
        future = dist.all_reduce(half, async_op=True).get_future()
        return future.then(lambda done: done.value()[0].to(torch.float32) / 2)

    torch.manual_seed(3)
    model = parallel(Chain(body=nn.Linear(4, 4), head=nn.Linear(4, 1)))
    if dist.is_initialized():
        model.register_comm_hook(None, add_first)

    def loss(model, x):
        return 4e4 * model(x).mean()

    return Run(model, loss, lambda step: randn(3, 4, seed=step).abs())
