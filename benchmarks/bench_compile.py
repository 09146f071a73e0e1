"""What the guard adds to a compiled training step."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from bench_guard import KEEPS_MEMORY, step_of
from bench_models import MODELS
from common import QUICK, plain_read, progress, race, ratio, summary, write
from torch._inductor import metrics

from overflow_fast import OverflowGuard

COLUMNS = [
    "model",
    "dtype",
    "guard",
    "bare ms",
    "guarded",
    "adds ms",
    "adds",
    "floor ms",
    "MiB scanned",
    "kernels",
]
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
            **row_of(times, kind, scanned),
            "kernels": kernels[kind] or "",
        }
        for kind in GUARDS
    ]


def row_of(
    times: dict[str, list[float]], kind: str, scanned: dict[str, int]
) -> dict[str, Any]:
    bare = statistics.median(times["bare"])
    added = statistics.median(
        a - b for a, b in zip(times[kind], times["bare"], strict=True)
    )
    is_guarded = kind in scanned
    floor = times[f"floor {kind}"] if is_guarded else [0.0]
    return {
        "guard": kind,
        "bare ms": f"{bare * 1e3:.0f}",
        "guarded": f"{ratio(times, kind, 'bare'):.3f}x",
        "adds ms": f"{added * 1e3:.1f}",
        "adds": f"{added / bare:.1%}",
        "floor ms": f"{statistics.median(floor) * 1e3:.1f}" if is_guarded else "",
        "MiB scanned": f"{scanned[kind] / 2**20:.0f}" if is_guarded else "",
        "seconds": {name: summary(seconds) for name, seconds in times.items()},
    }


def main() -> None:
    hf.logging.set_verbosity_error()
    torch._inductor.config.force_disable_caches = True  # kernels are counted
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        rows += measure("GPT-2 small", dtype, rounds=15)
        if QUICK:
            break
    write("compile", "The guard in compiled code", NOTES, rows, COLUMNS)


if __name__ == "__main__":
    if not KEEPS_MEMORY.items() <= os.environ.items():
        os.environ.update(KEEPS_MEMORY)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    main()
