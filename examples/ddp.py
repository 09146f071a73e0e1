"""DistributedDataParallel on two processes; the data of one of them has an outlier.

torchrun --nproc-per-node 2 examples/ddp.py            # planted on rank 1, in step 2
torchrun --nproc-per-node 2 examples/ddp.py --healthy  # 4 steps without it

After the reduction of gradients every rank would have the nan. The guard's verdict is
that of rank 1, before the reduction, and all ranks raise it.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overflow_fast import NonFiniteError, OverflowGuard


class Energy(nn.Module):
    """The mean square of a layer's output."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x).square().mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--healthy", action="store_true", help="plant nothing")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Energy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guard = OverflowGuard(model, optimizer)  # on every rank, after DDP wraps the model
    torch.manual_seed(dist.get_rank())
    for step in range(4):
        x = torch.randn(4, 8)
        if step == 2 and dist.get_rank() == 1 and not options.healthy:
            x[3] *= 1e25  # its square is beyond float32
        loss = guard.run(lambda x=x: model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except NonFiniteError as error:
        if dist.get_rank() == 0:  # it is the same on all
            print(error)
        dist.destroy_process_group()
        raise SystemExit(1) from None
