"""Trains a small model by DeepSpeed on this rank; writes what it saw to a file.

Arguments: folder, stage, dtype, fault ("none", "input", "overflow", "backward"), policy
("none" for no guard), watch. Two micro-batches make a step; step 3 is bad on the last
rank.
"""

import hashlib
import json
import logging
import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
import itertools

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from overflow_fast import NonFiniteError
from overflow_fast.integrations.deepspeed import guard_with

BAD, STEPS, MICRO = 3, 6, 2
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Broken(torch.autograd.Function):
    """A nan in backward alone."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)
        self.fault = ""

    def forward(self, x):
        hidden = torch.relu(self.up(x))
        if self.fault == "overflow":
            hidden = (hidden + 1) * torch.finfo(hidden.dtype).max * 2
        if self.fault == "backward":
            hidden = Broken.apply(hidden)
        return self.down(hidden).float().square().mean()


def state_of(engine, optimizer):
    """A digest of weights, master weights, their states and the schedule."""
    inner = getattr(optimizer, "optimizer", optimizer)
    digest = hashlib.md5()
    masters = [p for group in inner.param_groups for p in group["params"]]
    # In stage 3 weights are gathered from these, and let go of again.
    masters += getattr(optimizer, "fp32_partitioned_groups_flat", [])
    tensors = [each for each in engine.parameters() if not hasattr(each, "ds_id")]
    for parameter in masters:
        state = inner.state.get(parameter, {})
        tensors += [parameter, *filter(torch.is_tensor, state.values())]
    for tensor in tensors:
        digest.update(tensor.detach().float().numpy().tobytes())
    digest.update(str(engine.lr_scheduler.get_last_lr()).encode())
    return digest.hexdigest()


def main(folder, stage, dtype, fault, policy, watch):
    type(get_accelerator()).is_fp16_supported = lambda self: True  # slow, but there
    torch.manual_seed(0)
    model = Net()
    decay = [p for p in model.parameters() if p.dim() > 1]
    other = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay}, {"params": other, "weight_decay": 0.0}]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO,
        "zero_optimization": {"stage": int(stage)},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if dtype == "fp16":
        scale = 22 if fault == "none" else 4
        config["fp16"] = {
            "enabled": True,
            "initial_scale_power": scale,
            "hysteresis": 1,
        }
    deepspeed.init_distributed(dist_backend="gloo")
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
    )
    rank, world = dist.get_rank(), dist.get_world_size()
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    handler.setLevel(logging.WARNING)
    logging.getLogger("overflow_fast").addHandler(handler)
    guard = None
    if policy != "none":
        options = {} if watch == "all" else {"watch": watch}
        guard = guard_with(engine, on_overflow=policy, **options)
    digests, raised, losses = [], None, []
    for step in range(STEPS):
        is_bad = step == BAD and rank == world - 1
        try:
            for micro in range(MICRO):
                seed = (step * MICRO + micro) * world + rank
                x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
                model.fault = fault if is_bad and micro == 0 else ""
                if model.fault == "input":
                    x[1, 2] = float("nan")
                loss = engine(x.to(HALF[dtype]))
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
        except NonFiniteError as error:
            raised = step
            report = error.report
            digests.append(state_of(engine, optimizer))
            break
        digests.append(state_of(engine, optimizer))
    if policy in ("skip", "warn"):
        report = guard.last_report
    elif raised is None:
        report = None
    found = {
        "rank": rank,
        "moved": [a != b for a, b in itertools.pairwise(digests)],
        "digests": digests,
        "losses": losses,
        "raised": raised,
        "step": None if report is None else report.step,
        "fqn": None if report is None else report.verdict.first.fqn,
        "where": None if report is None else report.where,
        "text": str(report),
        "skipped": guard.num_skipped if guard else 0,
        "engine_skipped": engine.skipped_steps,
        "global_steps": engine.global_steps,
        "guard_step": guard.step if guard else None,
        "scale": getattr(optimizer, "cur_scale", getattr(optimizer, "loss_scale", 1)),
        "warnings": messages,
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier() if raised is None else None


if __name__ == "__main__":
    main(*sys.argv[1:])
