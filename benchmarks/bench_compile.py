"""What the guard adds to a compiled training step."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from bench_guard import COLUMNS, KEEPS_MEMORY, comparison, step_of
from bench_models import MODELS
from common import QUICK, plain_read, progress, race, write
from torch._inductor import metrics

from overflow_fast import OverflowGuard

NOTES = (
    "A training step with fused AdamW, compiled by inductor, guarded over bare: each "
    "is a model of its own, compiled with its own hooks; medians of paired rounds, all "
    "threads, with memory that the C library does not give back in between. `floor` is "
    "a plain read of as many bytes as the guard scans in a step. `eager` is the bare "
    "step without torch.compile. `kernels` is how many inductor has made for forward "
    "and backward: what is looked at cannot be fused away. Goal: under 10 % with "
    "module outputs and gradients."
)
OUTPUTS = ("activations", "grad_outputs", "gradients", "loss")
GUARDS: dict[str, dict[str, Any] | None] = {
    "bare": None,
    "eager": None,
    "calls, their gradients, gradients": {"watch": OUTPUTS},
    "everything": {},
}


def measure(name: str, dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    competitors: dict[str, Callable[[], object]] = {}
    scanned: dict[str, int] = {}
    kernels: dict[str, int] = {}
    for kind, arguments in GUARDS.items():
        progress(f"{name}, {dtype}: compiling {kind}")
        torch.manual_seed(0)
        metrics.reset()
        model, batch = MODELS[name]()
        model = model.to(dtype).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        compiled = model if kind == "eager" else torch.compile(model)
        step = step_of(compiled, batch, optimizer)
        if arguments is not None:
            guard = OverflowGuard(model, optimizer, **arguments)
            step()
            before = guard.coverage().bytes_scanned
            step()
            scanned[kind] = guard.coverage().bytes_scanned - before
        else:
            step()
        kernels[kind] = metrics.generated_kernel_count
        competitors[kind] = step
    read = plain_read()
    buffer = torch.ones(max(scanned.values()), dtype=torch.uint8)
    for kind, count in scanned.items():
        competitors[f"floor {kind}"] = lambda count=count: read(buffer[:count])
    times = race(competitors, rounds)
    return [
        {
            "model": name,
            "dtype": str(dtype)[6:],
            **comparison(times, kind, scanned),
            "kernels": kernels[kind] or "",
        }
        for kind in GUARDS
    ]


def main() -> None:
    hf.logging.set_verbosity_error()
    torch._inductor.config.force_disable_caches = True  # kernels are counted
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        rows += measure("GPT-2 small", dtype, rounds=15)
        if QUICK:
            break
    columns = [*COLUMNS[:-1], "kernels"]
    write("compile", "The guard in compiled code", NOTES, rows, columns)


if __name__ == "__main__":
    if not KEEPS_MEMORY.items() <= os.environ.items():
        os.environ.update(KEEPS_MEMORY)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    main()
