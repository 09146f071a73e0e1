"""Checks by experiment that a failure is what its truth says."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from overflow_fast.guard.report.causes import (
    BAD_DATA,
    BAD_WEIGHTS,
    NOT_REPRODUCIBLE,
    ONLY_COMPILED,
    ROUNDING,
    UNDERFLOW,
)

from .failure import Failure, Run, is_finite
from .oracle import base_of, look


def problems(failure: Failure) -> list[str]:
    """Lists what an experiment finds wrong with a failure's truth, in sentences."""
    found = []
    if ends_finite(failure, cured=False):
        found.append("it is finite")
    if not ends_finite(failure, cured=True):
        found.append("cured, it is not finite")
    if {UNDERFLOW.name, ROUNDING.name} & set(failure.causes) and not _is_finite_wide(
        failure
    ):
        found.append("in float64 from the start, it is not finite")
    return found + of_place(failure)


def _is_finite_wide(failure: Failure) -> bool:
    """True if the run is finite with weights and batches in float64."""
    return is_finite(in_float64(failure))


def in_float64(failure: Failure) -> Run:
    """The run of a failure with weights and batches in float64."""
    torch.manual_seed(0)
    run = failure.build(False)
    run.model.double()
    batch = run.batch
    run.batch = lambda step: tree_map(_wide, batch(step))
    return run


def _wide(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_float else value


def ends_finite(failure: Failure, cured: bool) -> bool:
    """True if a run is finite to its end."""
    torch.manual_seed(0)
    return is_finite(failure.build(cured))


def of_place(failure: Failure) -> list[str]:
    """Compares the truth with what is seen first where every operation is looked at.

    One process is enough for that, but for what processes make together.
    """
    if failure.kind == "transient" or failure.op.startswith("c10d"):
        return []  # cured, it is the same step without the fault
    if failure.cause == ONLY_COMPILED.name:
        with torch.compiler.set_stance("force_eager"):
            is_clean = ends_finite(failure, cured=False)
        return [] if is_clean else ["run eagerly, it fails too"]
    seen = look(failure)
    if seen is None:
        return ["no operation makes a bad value"]
    if failure.cause in (BAD_DATA.name, BAD_WEIGHTS.name):
        wanted = {f"{failure.phase} {name}" for name in failure.tensor.split("|")}
        return [] if wanted & set(seen.origin) else [f"it reads {seen}"]
    if failure.kind == "unwritten":
        wanted = f"unwritten {failure.line}"
        return [] if wanted in seen.origin else [f"it reads {seen}"]
    if failure.cause == NOT_REPRODUCIBLE.name:
        return []
    truths = [(base_of(op), failure.module, failure.line) for op in failure.ops]
    experiment = (base_of(seen.op), seen.module, seen.line if failure.line else 0)
    found = [] if experiment in truths else [f"it is {experiment} and not {truths}"]
    if seen.how != "made":
        found.append(f"it was read: {seen.origin}")
    phase = "optimizer" if seen.phase == "between" else seen.phase
    return found if phase == failure.phase else [*found, f"it is in {seen.phase}"]
