"""The repair of what a step was bad in by leaving it out. Imported by a bad step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from ...base.modules import parameters_of
from ...scanner.ops import are_nonfinite
from ..undo.restore_point import RestorePoint
from ..watching.watch import ModelWatch
from .verdict import Verdict


def is_beyond_repair(
    verdict: Verdict, watches: Sequence[ModelWatch], start: RestorePoint | None
) -> bool:
    """True if a weight or an optimizer's state stays non-finite without the step.

    Incurs a CPU-GPU sync for a weight.

    Args:
        verdict: The verdict, not clean.
        watches: The watched models.
        start: What a skip puts back, or None where it puts nothing back.
    """
    assert verdict.first is not None
    if verdict.first.kind == "optimizer_state":
        return True
    # Weights may also be in place for one call only (functional_call).
    if verdict.first.kind != "weight":
        return False
    weights = [
        weight
        for watch in watches
        if (model := watch.model) is not None
        for weight in parameters_of(model)
    ]
    return any(
        start is None or not _makes_finite(start, weight)
        for weight in itertools.compress(weights, are_nonfinite(weights))
    )


def _makes_finite(start: RestorePoint, weight: torch.Tensor) -> bool:
    """True for a weight that the forward has written to, and that was finite."""
    if not start.written_in_step(weight):
        return False
    held = start.held(weight)
    return held is not None and bool(held.isfinite().all())
