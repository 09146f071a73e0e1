"""Whole models from their configs: a forward and a training step, watched and not."""

from __future__ import annotations

import contextlib
import gc
import statistics
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from common import NO_ORIGINAL, Original, Results, original, progress, require_kernels
from floor import floor_kind, plain_read
from models import OF_TORCH, Batch, Make, adam, autocast, chosen_models, made, step_of
from timing import DEVICE, ON_GPU, QUICK, race, ratio, summary, wall_time
from torch import nn

from overflow_fast import DebugUnderflowOverflow, OverflowGuard

COLUMNS = [
    "model",
    "dtype",
    "run",
    "bare ms",
    "ours",
    "ours, lagged",
    "guard",
    "guard, lagged",
    "guard, gradients",
    "original",
    "detect_anomaly",
    "ours adds ms",
    "floor ms",
    "added / floor",
    "MiB scanned",
    "MiB listed",
    "peak MiB",
]
NOTES = (
    "Times over bare, medians of paired rounds, fused AdamW; on the CPU with all "
    "threads, on a GPU until it is done, with autocast where the dtype is bfloat16. "
    "`floor` is a plain read of as many bytes as ours scans, in the same rounds. "
    "`MiB listed` is what the frames list, and what the original reads six times. "
    "Goals: 1.3 times the floor plus the hooks; under 1.05 for the training step of "
    "GPT-2 small. `peak MiB`: memory of the GPU, bare and under the guard."
)
Around = dict[str, Callable[[], AbstractContextManager[object]]]


def forward_of(
    model: nn.Module, batch: Batch, dtype: torch.dtype
) -> Callable[[], object]:
    def forward() -> None:
        with torch.no_grad(), autocast(dtype):
            model(**batch)

    return forward


def loss_of(model: nn.Module, batch: Batch, dtype: torch.dtype) -> float:
    torch.manual_seed(0)
    with torch.no_grad(), autocast(dtype):
        return model(**batch).loss.item()


def bytes_of(model: nn.Module, batch: Batch, dtype: torch.dtype, memo: bool) -> int:
    """The bytes that one forward scans; the loss is checked on the way."""
    loss = loss_of(model, batch, dtype)
    with DebugUnderflowOverflow(model, memo=memo) as detector:
        assert loss_of(model, batch, dtype) == loss
    return detector.coverage.bytes_scanned


def watchers(
    model: nn.Module, optimizer: torch.optim.Optimizer, is_step: bool
) -> Around:
    """What a run is done under: entered before, left after the timed part."""
    around: Around = {
        "bare": contextlib.nullcontext,
        "ours": lambda: DebugUnderflowOverflow(model),
    }
    if ON_GPU:
        around["ours, lagged"] = lambda: DebugUnderflowOverflow(model, sync="lagged")
    if ON_GPU and is_step:
        around |= {
            "guard": lambda: OverflowGuard(model, optimizer),
            "guard, lagged": lambda: OverflowGuard(
                model, optimizer, "skip", sync="lagged"
            ),
            "guard, gradients": lambda: OverflowGuard(
                model, optimizer, watch=("gradients",)
            ),
        }
    if Original is not None:
        around["original"] = lambda: original(model)
    if not ON_GPU and is_step:  # it looks at backward only
        around["detect_anomaly"] = torch.autograd.detect_anomaly
    return around


def race_watchers(
    run: Callable[[], object], around: Around, rounds: int, scanned: int
) -> dict[str, list[float]]:
    """One model and one optimizer for all, so that all work on the same memory."""
    buffer = torch.ones(max(16, scanned), dtype=torch.uint8, device=DEVICE)
    read = plain_read()
    competitors: dict[str, Callable[[], object]] = dict.fromkeys(around, run)
    competitors["floor"] = lambda: read(buffer)
    return race(competitors, rounds, around=around, timer=wall_time)


def row_of(times: dict[str, list[float]]) -> dict[str, Any]:
    added = [a - b for a, b in zip(times["ours"], times["bare"], strict=True)]
    row: dict[str, Any] = {n: f"{ratio(times, n, 'bare'):.3g}x" for n in times}
    row["seconds"] = {n: summary(seconds) for n, seconds in times.items()}
    row["bare ms"] = f"{statistics.median(times['bare']) * 1e3:.3g}"
    row["floor ms"] = f"{statistics.median(times['floor']) * 1e3:.3g}"
    row["ours adds ms"] = f"{statistics.median(added) * 1e3:.3g}"
    of_floor = statistics.median(added) / statistics.median(times["floor"])
    return row | {"added / floor": f"{of_floor:.2f}"}


def peaks(run: Callable[[], object], around: Around) -> str:
    """The most memory of a GPU that a step takes, bare and under the guard."""
    found = []
    for name in ("bare", "guard"):
        torch.cuda.reset_peak_memory_stats()
        with around[name]():
            run()
        found.append(f"{torch.cuda.max_memory_allocated() / 2**20:.0f}")
    return ", ".join(found)


def measure(results: Results, name: str, make: Make, dtype: torch.dtype) -> None:
    model, batch = made(make, torch.float32 if ON_GPU else dtype)
    scanned, listed = (bytes_of(model, batch, dtype, memo) for memo in (True, False))
    optimizer = adam(model)
    for kind, run, rounds in (
        ("training step", step_of(model, batch, optimizer, dtype), 7),
        ("forward", forward_of(model, batch, dtype), 9),
    ):
        around = watchers(model, optimizer, kind == "training step")
        row = {"model": name, "dtype": str(dtype)[6:], "run": kind}
        row |= row_of(race_watchers(run, around, rounds, scanned))
        row["MiB scanned"] = f"{scanned / 2**20:.0f}"
        row["MiB listed"] = f"{listed / 2**20:.0f}"
        if ON_GPU and "guard" in around:
            row["peak MiB"] = peaks(run, around)
        results.add(row)
        if kind == "training step":
            watched = [n for n in ("ours", "guard", "guard, lagged") if n in row]
            said = ", ".join(f"{n} {row[n]}" for n in watched)
            results.headline(f"{name}, {row['dtype']}: {row['bare ms']} ms, {said}")


def main() -> None:
    require_kernels()
    warnings.filterwarnings("ignore", "Anomaly Detection")
    results = Results("models", "Whole models", NOTES, COLUMNS)
    results.lacks(floor_kind())
    if Original is None:
        results.lacks(NO_ORIGINAL)
    models, lacking = (OF_TORCH, []) if QUICK else chosen_models()
    for sentence in lacking:
        results.lacks(sentence)
    chosen = [name for name in models if name in sys.argv] or list(models)
    dtypes = (torch.bfloat16,) if ON_GPU else (torch.float32, torch.bfloat16)
    for name in chosen:
        for dtype in dtypes[: 1 if QUICK else None]:
            progress(f"{name}, {dtype}")
            try:
                measure(results, name, models[name], dtype)
            except torch.OutOfMemoryError as error:
                results.lacks(f"{name}: {str(error).splitlines()[0][:120]}")
            gc.collect()
            if ON_GPU:
                torch.cuda.empty_cache()
    results.finish()


if __name__ == "__main__":
    main()
