"""Trains a small model by DeepSpeed on this rank; see engine_runs.py."""

import functools
import os

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from engine_runs import HALF, MICRO, Training, faulty, play_all
from torch import nn

from overflow_fast.integrations.deepspeed import guard_with


class Net(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)
        self.fault = fault

    def forward(self, x):
        mark = x.detach().nan_to_num().max().clamp(50) / 50
        hidden = faulty(torch.relu(self.up(x)), mark, self.fault)
        return self.down(hidden).float().square().mean()


def config_of(case):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO,
        "zero_optimization": {"stage": int(next(filter(str.isdigit, case.layout)))},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if case.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if case.layout.endswith("fp32 sums"):  # BF16_Optimizer
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if case.dtype == "fp16":
        power = {"search": 40, "persistent": 1}.get(case.fault, 4)
        config["fp16"] = {
            "enabled": True,
            "initial_scale_power": power,
            "hysteresis": 1,
        }
    return config


def groups_of(model):
    decay = [p for p in model.parameters() if p.dim() > 1]
    other = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": decay}, {"params": other, "weight_decay": 0.0}]


def state_of(engine, optimizer):
    """Weights, master weights, their states and the scale."""
    inner = getattr(optimizer, "optimizer", optimizer)
    masters = [p for group in inner.param_groups for p in group["params"]]
    # In stage 3 weights are gathered from these, and let go of again.
    masters += getattr(optimizer, "fp32_partitioned_groups_flat", [])
    masters += getattr(optimizer, "fp16_partitioned_groups_flat", [])
    tensors = [p for p in engine.parameters() if not hasattr(p, "ds_id")]
    for parameter in masters:
        states = inner.state.get(parameter, {})
        tensors += [parameter, *filter(torch.is_tensor, states.values())]
    scale = getattr(optimizer, "cur_scale", getattr(optimizer, "loss_scale", 1))
    return [*tensors, scale]


def make(case):
    model = Net(case.fault)
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=config_of(case)
    )
    rank, world = dist.get_rank(), dist.get_world_size()

    def step(number, fault):
        losses = []
        for micro in range(MICRO):
            seed = (number * MICRO + micro) * world + rank
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
            if fault and micro == 0:
                x[1, 2] = float("nan") if fault == "input" else 500.0
            loss = engine(x.to(HALF[case.dtype]))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        return losses

    def state():
        return [*state_of(engine, optimizer), engine.lr_scheduler.state_dict()]

    def facts():
        return {
            "optimizer": type(optimizer).__name__,
            "engine_skipped": engine.skipped_steps,
            "global_steps": engine.global_steps,
        }

    make_guard = functools.partial(guard_with, engine)
    return Training(model, make_guard, step, state, facts)


if __name__ == "__main__":
    type(get_accelerator()).is_fp16_supported = lambda self: True  # slow, but there
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles it
    deepspeed.init_distributed(dist_backend="gloo")
    play_all(make)
