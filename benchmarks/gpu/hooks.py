"""What a hooked module costs the host on a GPU, how often it waits, and the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from common import progress, silence
from timing import DEVICE, DRY, host_time, quartiles, race, save, synchronize
from torch import nn
from transformers.debug_utils import DebugUnderflowOverflow as Original

from overflow_fast import DebugUnderflowOverflow

LENGTH = 20 if DRY else 200  # below the depth of the GPU's queue


def empty(module: nn.Module, inputs: object, output: object) -> None:
    pass


def chain(make: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(make() for _ in range(LENGTH))).to(DEVICE)


def watched(make: Callable[[], nn.Module]) -> dict[str, nn.Module]:
    names = ("bare", "empty hook", "step", "lagged", "frame", "original")
    models = {name: chain(make) for name in names}
    for module in models["empty hook"].modules():
        module.register_forward_hook(empty)
    for sync in ("step", "lagged", "frame"):
        DebugUnderflowOverflow(models[sync], sync=sync)
    Original(models["original"])
    return models


@torch.no_grad()
def host_cost(kind: str, make: Callable[[], nn.Module]) -> list[dict[str, Any]]:
    models, x = watched(make), torch.ones(16, 64, device=DEVICE)
    runs = {name: lambda m=model: m(x) for name, model in models.items()}
    with silence():
        times = race(runs, 1, host_time, 15)
    bare = quartiles(times["bare"])[1]
    rows = []
    for name, seconds in times.items():
        spread = [q / LENGTH * 1e6 for q in quartiles(seconds)]
        added = spread[1] - bare / LENGTH * 1e6
        row = {"kind": "module", "chain": kind, "watched": name, "us": spread}
        rows.append(row | {"added_us": added})
    return rows


def syncs_and_memory() -> list[dict[str, Any]]:
    rows = []
    for sync in ("step", "lagged"):
        model = chain(lambda: nn.Linear(64, 64))
        x = torch.ones(16, 64, device=DEVICE)
        model(x).sum().backward()
        synchronize()
        before = 0 if DRY else torch.cuda.memory_allocated()
        detector = DebugUnderflowOverflow(model, sync=sync)
        for _ in range(3):
            model(x).sum().backward()
        detector.check()
        row: dict[str, Any] = {"kind": "step", "sync": sync}
        row["slots"] = detector.coverage.tensors_scanned // 3
        if not DRY:
            row["bytes_added"] = torch.cuda.memory_allocated() - before
            torch.cuda.set_sync_debug_mode("error")
        count = detector._recorder.num_syncs
        for _ in range(10):
            model(x).sum().backward()
        row["host_waits_in_10_steps"] = detector._recorder.num_syncs - count
        if not DRY:
            torch.cuda.set_sync_debug_mode("default")
        detector.check()
        rows.append(row)
    return rows


def main() -> None:
    rows = []
    for kind, make in {
        "Identity": nn.Identity,
        "Linear": lambda: nn.Linear(64, 64),
    }.items():
        progress(kind)
        rows += host_cost(kind, make)
    rows += syncs_and_memory()
    save("hooks", rows)


if __name__ == "__main__":
    main()
