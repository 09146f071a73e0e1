"""Does `compare` name the first wrong layer, and is it quiet on healthy pairs."""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import progress, threads, write
from compared import MODELS, batch_of, errors_of, make, softmax_order
from timing import QUICK
from torch import nn

import overflow_fast

SEEDS = 2 if QUICK else 30
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
COLUMNS = [
    *("model", "pair", "planted", "runs", "named", "misnamed", "silent", "worst times"),
    "what was not named",
]
NOTES = (
    "A step (forward and backward) of small models from their configs, recorded with "
    "fingerprints and compared. `named`: the first difference is in the module that "
    "was changed, or in one within it; `misnamed`: in another one; `silent`: nothing "
    "is named. Rows without an error are healthy: there `silent` is right. `worst "
    "times` is the largest difference as a multiple of the larger one of what rounding "
    "explains and what was propagated; 8 is flagged (3 for weights, which are only "
    "cast)."
)


def record(folder: Path, model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    with overflow_fast.recording(folder, model):
        model(**batch).loss.backward()


def compared(
    name: str, seed: int, pair: tuple[str, str], change: Callable[..., Any] | None
) -> tuple[overflow_fast.Comparison, str | None]:
    """Compares a model that may be changed with one that is not; and what changed."""
    reference = make(name, seed)
    model = copy.deepcopy(reference).to(DTYPES[pair[0]])
    reference = reference.to(DTYPES[pair[1]])
    truth = None if change is None else change(model, name)
    with tempfile.TemporaryDirectory() as top:
        folders = Path(top) / "a", Path(top) / "b"
        for folder, each, dtype in zip(folders, (model, reference), pair, strict=True):
            record(folder, each, batch_of(name, seed, DTYPES[dtype]))
        return overflow_fast.compare(*folders), truth


def worst_of(diff: overflow_fast.Comparison) -> float:
    found = [
        row.relative / max(row.explained, row.propagated)
        for row in diff.rows
        if not row.why and row.relative and row.verdict != "introduced"
        if row.explained < float("inf") and not row.notes  # of masks
    ]
    return max(found, default=0.0)


def row_of(
    name: str, pair: tuple[str, str], change: Callable[..., Any] | None, seeds: int
) -> dict[str, Any]:
    counts = {"named": 0, "misnamed": 0, "silent": 0}
    worst, wrong = 0.0, list[str]()
    for seed in range(seeds):
        diff, truth = compared(name, seed, pair, change)
        first = diff.first
        if first is None:
            counts["silent"] += 1
        elif truth is not None and first.module.startswith(truth):
            counts["named"] += 1
        else:
            counts["misnamed"] += 1
            wrong.append(f"seed {seed}: {first}")
        worst = max(worst, worst_of(diff))
    planted = "" if change is None else change.__name__.replace("_", " ")
    row = {"model": name, "pair": " / ".join(pair), "planted": planted, "runs": seeds}
    return {
        **row,
        **counts,
        "worst times": f"{worst:.2g}",
        "what was not named": "; ".join(wrong[:2]),
    }


def main() -> None:
    rows = []
    same = [("float32", "float32"), ("bfloat16", "bfloat16")]
    mixed = [("bfloat16", "float32"), ("float16", "float32")]
    with threads(1):
        for name in MODELS:
            for pair in (*same[:1], *mixed):
                progress(f"{name}, healthy, {pair}")
                rows.append(row_of(name, pair, None, SEEDS))
            rows.append(row_of(name, same[0], softmax_order, SEEDS))
            for pair in (*same, mixed[0]):
                for change in errors_of(name):
                    progress(f"{name}, {change.__name__}, {pair}")
                    rows.append(row_of(name, pair, change, min(SEEDS, 3)))
    write("compare", "Comparisons of runs", NOTES, rows, COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
