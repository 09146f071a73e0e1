"""The cost of an explanation, and of a look at every operation of a clean step."""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import peak_of, progress, size_text, threads, write
from models import ON_CPU
from timing import QUICK
from torch import nn

from overflow_fast import (
    Explain,
    MaskedOps,
    OverflowGuard,
)

COLUMNS = [
    *("dtype", "what", "step ms", "takes ms", "steps", "forwards", "a step"),
    *("step memory", "adds"),
]
NOTES = (
    "GPT-2 small, 2 texts of 128 tokens, fused AdamW, all threads. An explanation is "
    "of a step whose feed-forward overflows in the middle of the model (weights are "
    "scaled): replays, the table of operations, the sample, and the remedies that are "
    "tried; it comes once for an incident. `MaskedOps` looks inside every operation of "
    "one clean step in N: `a step` is its share with N = 100. Medians of steps of one "
    "process. `step memory`: what a process holds at most in which three steps run; it "
    "`adds` so much where the third is looked into or explained (one thread)."
)
ROUNDS = 2 if QUICK else 5
BUDGETS = (8, 2)


def timed(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


class Training:
    """A model in training; calling it makes a step."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        model, self.batch = ON_CPU["GPT-2 small"]()
        self.model = model.to(dtype).train()
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)

    def __call__(self) -> None:
        self.model(**self.batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


def peaks_of(dtype: torch.dtype) -> list[int]:
    """What a process holds at most: of steps alone, of MaskedOps, of explanations."""

    def run(is_bad: bool = False, **options: Any) -> None:
        step = Training(dtype)
        with threads(1), contextlib.ExitStack() as stack:
            step()
            step()
            if is_bad:
                plant(step.model)
            if options:
                guard = OverflowGuard(step.model, step.optimizer, "skip", **options)
                stack.enter_context(guard)
            step()

    ways: list[dict[str, Any]] = [
        {},
        {"monitors": [MaskedOps(every=1)]},
        *({"is_bad": True, "explain": Explain("always", budget=n)} for n in BUDGETS),
    ]
    return [peak_of(lambda way=way: run(**way)) for way in ways]


def rows_of(dtype: torch.dtype, bare: int, *peaks: int) -> list[dict[str, Any]]:
    step = Training(dtype)
    model, optimizer = step.model, step.optimizer
    step()
    looks, plain = [], []
    with OverflowGuard(model, optimizer, monitors=[MaskedOps(every=2)]) as guard:
        for _ in range(ROUNDS + 1):
            seen, unseen = timed(step), timed(step)
            looks.append(seen - unseen)
            plain.append(unseen)
        assert guard.last_report is None
    base, look = statistics.median(plain[1:]), statistics.median(looks[1:])
    shared = {"dtype": str(dtype)[6:], "step ms": f"{base * 1e3:.0f}"}
    audit = {
        "what": "MaskedOps",
        "takes ms": f"{look * 1e3:.0f}",
        "steps": f"{look / base:.2f}",
        "forwards": 1,
        "a step": f"{look / base / 100:.2%}",
        "seconds": looks,
    }
    plant(model)
    found = [explained(model, optimizer, step, base, budget) for budget in BUDGETS]
    for row, peak in zip((audit, *found), peaks, strict=True):
        row |= {"step memory": size_text(bare), "adds": size_text(max(0, peak - bare))}
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
    asked = Explain("always", budget=budget)
    with OverflowGuard(model, optimizer, on_overflow="skip", explain=asked) as guard:
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
        "what": f"explanation, budget={budget}",
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
    dtypes = (torch.float32, torch.bfloat16)
    peaks = {each: peaks_of(each) for each in dtypes}  # before threads: they fork
    rows = []
    for dtype in dtypes:
        progress(str(dtype))
        rows += rows_of(dtype, *peaks[dtype])
    write("explain", "The cost of an explanation", NOTES, rows, COLUMNS)


if __name__ == "__main__":
    main()
