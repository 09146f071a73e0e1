"""How much slower a compiled training step becomes on a GPU under the guard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from common import progress, ratio
from models import MODELS, step_of
from timing import DEVICE, DRY, quartiles, save, wall_time

from overflow_fast import OverflowGuard

ROUNDS = 2 if DRY else 9


def competitor(name: str, mode: str, is_guarded: bool) -> Callable[[], object]:
    """A step of a model of its own, compiled with its own hooks."""
    torch.manual_seed(0)
    make, _ = MODELS[name]
    model, shape = make()
    model = model.to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    if is_guarded:
        OverflowGuard(model, optimizer)
    model.compile(mode=mode)
    return step_of(model, optimizer, shape)


def measure(name: str, mode: str) -> dict[str, Any]:
    steps = {
        "bare": competitor(name, mode, is_guarded=False),
        "guard": competitor(name, mode, is_guarded=True),
    }
    for _ in range(3):  # compiles, warms up and captures
        for step in steps.values():
            step()
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(ROUNDS):
        for kind, step in steps.items():
            times[kind].append(wall_time(step, 1 if DRY else MODELS[name][1]))
    row: dict[str, Any] = {"kind": "compiled step", "model": name, "mode": mode}
    for kind, seconds in times.items():
        row[kind] = {
            "seconds": quartiles(seconds),
            "over_bare": ratio(times, kind, "bare"),
        }
    return row


def main() -> None:
    hf.logging.set_verbosity_error()
    rows = []
    for name in list(MODELS)[: 1 if DRY else 2]:
        for mode in ("default", "reduce-overhead")[: 1 if DRY else None]:
            progress(f"{name}, {mode}")
            rows.append(measure(name, mode))
    save("compile", rows)


if __name__ == "__main__":
    main()
