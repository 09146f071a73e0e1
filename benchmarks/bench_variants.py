"""Which variants of the device code win: each value of each decision, by its rule.

Each value is measured in a process of its own, with the variable of the environment
that selects it; the default twice, of which the better run counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from common import Results, progress, require_kernels
from decisions import DECISIONS
from facts import SKIPPED
from timing import (
    DEVICE,
    ON_GPU,
    QUICK,
    device_time,
    free_bytes,
    host_time,
    in_turn,
    race,
    summary,
    wall_time,
)
from torch import nn

from overflow_fast import DebugUnderflowOverflow

COLUMNS = ["decision", "variable", "value", "metric", "measured", "over default"]
NOTES = (
    "Rule: the first value of a decision stays unless another is better by the margin "
    "that benchmarks/decisions.py names. Smaller is better."
)
LENGTH = 20 if QUICK else 100
ROUNDS = 9
op = torch.ops.overflow_fast.scan.default


def microseconds(
    function: Callable[[], object], timer: Any = device_time, calls: int = 50
) -> float:
    times = race({"it": function}, ROUNDS, timer=timer, max_calls=calls)
    return summary(times["it"])["median"] * 1e6


def scan_of(count: int, num_bytes: int, num_lists: int = 1) -> Callable[[], object]:
    """Scans of lists of tensors in turn."""
    slots = torch.tensor([[-1, 0, 0, 0]] * count, device=DEVICE)
    lists = [
        [torch.rand(num_bytes // 4, device=DEVICE) for _ in range(count)]
        for _ in range(num_lists)
    ]
    return in_turn(lambda tensors: op(slots, 0, tensors), lists)


def scan_us_large() -> float:
    """A tensor of 1 GiB, less where less is free; two in turn."""
    return microseconds(scan_of(1, min(2**30, free_bytes() // 4), 2), calls=10)


def scan_us_one() -> float:
    """A tensor of 4 KiB."""
    return microseconds(scan_of(1, 4096))


def scan_us_small() -> float:
    """A thousand tensors of 4 KiB."""
    return microseconds(scan_of(1000, 4096))


def scan_us_mixed() -> float:
    """A list of 40 runs of 4 MiB and a tensor whose rows are cut off."""
    numel = 2**14 if QUICK else 2**20
    tensors = [torch.rand(numel, device=DEVICE) for _ in range(40)]
    tensors.append(torch.rand(1000, 257, device=DEVICE)[:, :255])
    slots = torch.tensor([[-1, 0, 0, 0]] * len(tensors), device=DEVICE)
    return microseconds(lambda: op(slots, 0, tensors))


def scan_us_medium() -> float:
    """A tensor of 16 MiB of many, so that no cache holds it."""
    return microseconds(scan_of(1, 2**18 if QUICK else 2**24, 32))


def chain() -> nn.Module:
    layers = (nn.Linear(16, 16, bias=False) for _ in range(LENGTH))
    return nn.Sequential(*layers).to(DEVICE)


def frame_host_us() -> float:
    """The host's time for a hooked module, in a forward that nobody waits for."""
    model, x = chain(), torch.ones(4, 16, device=DEVICE)
    detector = DebugUnderflowOverflow(model, sync="lagged")
    with torch.no_grad():
        found = microseconds(lambda: model(x), host_time, 1)
    detector.check()
    return found / LENGTH


def step_end_us() -> float:
    """A forward of many frames with its end, less the same without a detector."""
    model, x = chain(), torch.ones(4, 16, device=DEVICE)
    with torch.no_grad():
        bare = microseconds(lambda: model(x), wall_time, 5)
        detector = DebugUnderflowOverflow(model)

        def step() -> None:
            model(x)
            detector.check()

        return microseconds(step, wall_time, 5) - bare


METRICS: dict[str, Callable[[], float]] = {
    function.__name__: function
    for function in (
        scan_us_large,
        scan_us_medium,
        scan_us_one,
        scan_us_small,
        scan_us_mixed,
        frame_host_us,
        step_end_us,
    )
}


def measured(metric: str, variable: str, value: str) -> float | str:
    """A metric in a fresh process, or why there is none."""
    if metric not in METRICS:
        return f"there is no metric {metric!r}; there are {', '.join(METRICS)}"
    environment = os.environ | {variable: value}
    command = [sys.executable, __file__, "--metric", metric, *sys.argv[1:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return float(json.loads(done.stdout.splitlines()[-1]))
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return lines[-1][:200]


def winner(values: tuple[str, ...], found: dict[str, float], margin: float) -> str:
    """The default, unless the best other value is better by more than the margin."""
    default = values[0]
    if default not in found:
        return default
    best = min(found, key=lambda value: found[value])
    return best if found[best] < found[default] * (1 - margin) else default


def decide(results: Results, decision: Any) -> None:
    """Measures each value, the default again at the end, and says who wins."""
    default = decision.values[0]
    runs: dict[str, list[float]] = {}
    for value in (*decision.values, default):
        progress(f"{decision.name}: {decision.variable}={value}")
        figure = measured(decision.metric, decision.variable, value)
        row = {"decision": decision.name, "variable": decision.variable}
        row |= {"value": value, "metric": decision.metric}
        if isinstance(figure, str):
            results.lacks(f"{decision.name}, {value}: {figure}")
            results.add(row | {"measured": figure})
            continue
        runs.setdefault(value, []).append(figure)
        over = figure / runs[default][0] if default in runs else None
        row["measured"] = f"{figure:.4g}"
        results.add(row | {"over default": f"{over:.3f}" if over else ""})
    found = {value: min(each) for value, each in runs.items()}
    if not found:
        return results.headline(f"{decision.name}: nothing could be measured")
    best = winner(decision.values, found, decision.margin)
    word = "stays" if best == default else "wins"
    figures = ", ".join(f"{value}: {figure:.4g}" for value, figure in found.items())
    results.headline(f"{decision.name}: {best!r} {word} ({decision.metric}: {figures})")


def main() -> None:
    if "--metric" in sys.argv:
        print(json.dumps(METRICS[sys.argv[sys.argv.index("--metric") + 1]]()))
        return
    require_kernels()
    if not ON_GPU and not QUICK:
        print("skipped: the variants are of a GPU's code")
        sys.exit(SKIPPED)
    results = Results("variants", "Variants, and which one wins", NOTES, COLUMNS)
    for decision in DECISIONS:
        decide(results, decision)
    results.finish()


if __name__ == "__main__":
    main()
