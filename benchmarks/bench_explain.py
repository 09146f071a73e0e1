"""The cost of an explanation, and of a look at every operation of a clean step."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import progress, write
from models import ON_CPU
from timing import QUICK
from torch import nn

from overflow_fast import OverflowGuard

COLUMNS = ["dtype", "what", "step ms", "takes ms", "steps", "forwards", "a step"]
NOTES = (
    "GPT-2 small, 2 texts of 128 tokens, fused AdamW, all threads. An explanation is "
    "of a step whose feed-forward overflows in the middle of the model (weights are "
    "scaled): replays, the table of operations, the sample, and the remedies that are "
    "tried; it comes once for an incident. `ops_every` looks inside every operation of "
    "one clean step in N: `a step` is its share with N = 100. Medians of steps of one "
    "process."
)
ROUNDS = 2 if QUICK else 5


def timed(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def rows_of(dtype: torch.dtype) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model, batch = ON_CPU["GPT-2 small"]()
    model = model.to(dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step()
    looks, plain = [], []
    with OverflowGuard(model, optimizer, ops_every=2) as guard:
        for _ in range(ROUNDS + 1):
            seen, unseen = timed(step), timed(step)
            looks.append(seen - unseen)
            plain.append(unseen)
        assert guard.last_report is None
    base, look = statistics.median(plain[1:]), statistics.median(looks[1:])
    shared = {"dtype": str(dtype)[6:], "step ms": f"{base * 1e3:.0f}"}
    audit = {
        "what": "ops_every",
        "takes ms": f"{look * 1e3:.0f}",
        "steps": f"{look / base:.2f}",
        "forwards": 1,
        "a step": f"{look / base / 100:.2%}",
        "seconds": looks,
    }
    plant(model)
    found = [explained(model, optimizer, step, base, budget) for budget in (8, 2)]
    return [{**shared, **row} for row in (audit, *found)]


def explained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[[], object],
    base: float,
    budget: int,
) -> dict[str, Any]:
    """Explains the same bad step again and again; it is skipped each time."""
    seconds, forwards = [], []
    options: dict[str, Any] = {"explain": True, "explain_budget": budget}
    with OverflowGuard(model, optimizer, on_overflow="skip", **options) as guard:
        for _ in range(ROUNDS):
            step()
            assert guard.last_report is not None
            found = guard.last_report.explanation
            assert found is not None and found.op is not None
            assert found.module.startswith("transformer.h.6.mlp"), found
            seconds.append(found.seconds)
            forwards.append(found.replays)
    median = statistics.median(seconds)
    return {
        "what": f"explanation, explain_budget={budget}",
        "takes ms": f"{median * 1e3:.0f}",
        "steps": f"{median / base:.1f}",
        "forwards": statistics.median(forwards),
        "a step": "",
        "seconds": seconds,
    }


def plant(model: nn.Module) -> None:
    """Scales a feed-forward so that its product is beyond float32 and bfloat16."""
    mlp = model.get_submodule("transformer.h.6.mlp")
    with torch.no_grad():
        for each in (mlp.c_fc, mlp.c_proj):
            each.weight.mul_(1e22)


def main() -> None:
    logging.disable(logging.WARNING)  # the reports themselves
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        progress(str(dtype))
        rows += rows_of(dtype)
    write("explain", "The cost of an explanation", NOTES, rows, COLUMNS)


if __name__ == "__main__":
    main()
