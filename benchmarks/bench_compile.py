"""What the guard adds to a compiled training step."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from bench_guard import COLUMNS, KEEPS_MEMORY, comparison
from common import Results, progress, require_kernels
from floor import floor_kind, plain_read
from models import OF_TORCH, Make, adam, chosen_models, made, step_of
from timing import DEVICE, ON_GPU, QUICK, race, wall_time
from torch._inductor import metrics

from overflow_fast import OverflowGuard

NOTES = (
    "A training step with fused AdamW, compiled by inductor, guarded over bare: each "
    "is a model of its own, compiled with its own hooks; medians of paired rounds, on "
    "the CPU with all threads and with memory that the C library does not give back in "
    "between. `floor` is a plain read of as many bytes as the guard scans in a "
    "step. `eager` is the bare step without torch.compile. `kernels` is how many "
    "inductor has made for forward and backward: what is looked at cannot be fused "
    "away. Goal: under 10 % with module outputs and gradients."
)
OUTPUTS = ("activations", "grad_outputs", "gradients", "loss")
GUARDS: dict[str, dict[str, Any] | None] = {
    "bare": None,
    "eager": None,
    "calls, their gradients, gradients": {"watch": OUTPUTS},
    "everything": {},
}
MODES = ("default", "reduce-overhead") if ON_GPU else ("default",)


class Competitor:
    """A model of its own, compiled in a mode with its own hooks."""

    def __init__(self, make: Make, dtype: torch.dtype, mode: str, kind: str) -> None:
        metrics.reset()
        model, batch = made(make, torch.float32 if ON_GPU else dtype)
        optimizer = adam(model)
        guard = None
        arguments = GUARDS[kind]
        if arguments is not None:
            guard = OverflowGuard(model, optimizer, **arguments)
        if kind != "eager":
            model.compile(mode=mode)
        self.step = step_of(model, batch, optimizer, dtype)
        self.step()
        self.scanned = 0
        if guard is not None:
            before = guard.coverage().bytes_scanned
            self.step()
            self.scanned = guard.coverage().bytes_scanned - before
        self.kernels = metrics.generated_kernel_count
        for _ in range(3 if ON_GPU else 0):  # warms up and captures
            self.step()


def measure(
    results: Results, name: str, make: Make, dtype: torch.dtype, mode: str
) -> None:
    is_short = QUICK or mode != "default"
    kinds = ["bare", "everything"] if is_short else list(GUARDS)
    competitors: dict[str, Competitor] = {}
    for kind in kinds:
        progress(f"{name}, {dtype}, {mode}: compiling {kind}")
        competitors[kind] = Competitor(make, dtype, mode, kind)
    runs: dict[str, Callable[[], object]] = {k: c.step for k, c in competitors.items()}
    scanned = {kind: c.scanned for kind, c in competitors.items() if c.scanned}
    read, most = plain_read(), max(16, *scanned.values(), 16)
    buffer = torch.ones(most, dtype=torch.uint8, device=DEVICE)
    for kind, count in scanned.items():
        runs[f"floor {kind}"] = lambda count=count: read(buffer[: count & ~15])
    times = race(runs, 15, timer=wall_time)
    for kind in kinds:
        row = {"model": name, "dtype": str(dtype)[6:], "mode": mode}
        row |= comparison(times, kind, scanned)
        results.add(row | {"kernels": competitors[kind].kernels or ""})
    last = results.rows[-1]
    results.headline(f"{name}, {mode}: {last['guarded']} with everything")


def main() -> None:
    require_kernels()
    torch._inductor.config.force_disable_caches = True  # kernels are counted
    columns = [*COLUMNS[:2], "mode", *COLUMNS[2:-1], "kernels"]
    results = Results("compile", "The guard in compiled code", NOTES, columns)
    results.lacks(floor_kind())
    models, lacking = (OF_TORCH, []) if QUICK else chosen_models()
    for sentence in lacking:
        results.lacks(sentence)
    names = list(models)[: 2 if ON_GPU else 1]
    dtypes = (torch.bfloat16,) if ON_GPU else (torch.float32, torch.bfloat16)
    for name in names:
        for dtype in dtypes[: 1 if QUICK else None]:
            for mode in MODES:
                torch._dynamo.reset()
                try:
                    measure(results, name, models[name], dtype, mode)
                except torch.OutOfMemoryError as error:
                    results.lacks(f"{name}: {str(error).splitlines()[0][:120]}")
                gc.collect()
    results.finish()


if __name__ == "__main__":
    if not ON_GPU and not KEEPS_MEMORY.items() <= os.environ.items():
        os.environ.update(KEEPS_MEMORY)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    main()
