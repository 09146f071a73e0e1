"""Tries remedies in order, by the cause of a failure."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from ..explanation import Remedy
from ..parts import batch_size
from ..places import span_of
from ..rerun import Rerun
from .changes import (
    LineChange,
    ScaledGradients,
    SomeSamples,
)
from .checkpoints import of_checkpoints
from .failure import Failure
from .line_edit import CodePlace, NotEditableError, SourceFile
from .line_forms import forms_of
from .trials import Trials
from .wider_dtypes import of_precision
from .written import Written

_LINES = ("range overflow", "undefined", "singular gradient", "empty reduction")
_MAX_FORMS = 4


def find_remedies(
    failure: Failure, rerun: Rerun, budget: int, step_seconds: float
) -> None:
    """Tries remedies on the step, and adds them to its explanation.

    Args:
        failure: The failure.
        rerun: Runs the step; its state is kept.
        budget: How many forwards may be run.
        step_seconds: How long a plain replay took.
    """
    trials = Trials(rerun, budget, step_seconds)
    try:
        for attempt in _attempts(failure, trials):
            if trials.is_over:
                break
            attempt()
    except NotEditableError as error:
        trials.notes.append(f"A change of the line was not tried: {error}.")
    found = failure.found
    found.remedies = sorted(trials.remedies, key=lambda each: not each.is_finite)
    found.notes += trials.notes


def _attempts(failure: Failure, trials: Trials) -> Iterator[Any]:
    cause = failure.found.cause
    if cause == "bad data":
        yield from _of_data(failure, trials)
    if cause == "bad weights":
        yield from of_checkpoints(failure.checkpoints, trials)
    if cause == "range overflow":
        yield from of_precision(failure, trials)
    if cause in _LINES:
        yield from _of_lines(failure, trials)
    if cause == "range overflow" and failure.found.phase == "backward":
        yield from _of_scale(failure, trials)


def _of_lines(failure: Failure, trials: Trials) -> Iterator[Any]:
    """Guarded forms of the line of the operation."""
    op, row = failure.found.op, failure.row
    if op is None or row is None or not row.frames:
        return
    code, span = row.frames[0][0], span_of(row.frames)
    source = SourceFile(code.co_filename)
    node = None if span is None else source.node_at(span)
    if node is None:
        return
    place = CodePlace.of(code)
    forms = forms_of(Written(source, node), op, failure.found.cause)
    for _, form in zip(range(_MAX_FORMS), forms, strict=False):
        edit = source.edited(node, form.code)
        remedy = Remedy(
            form.text, edit.code, file=op.file, line=edit.first, last_line=edit.last
        )
        yield functools.partial(trials.attempt, remedy, LineChange(place, edit.text))


def _of_data(failure: Failure, trials: Trials) -> Iterator[Any]:
    """The step without the samples that are not finite."""
    found, rerun = failure.found, trials.rerun
    size, bad = batch_size(rerun.calls[failure.place]), failure.bad
    if not rerun.team.can_cut(failure.place):
        return
    if size is None or bad is None or not bad.dim() or len(bad) != size:
        return
    rows = bad.detach().isfinite().reshape(size, -1).all(1).nonzero().flatten().tolist()
    if not rows:
        return
    name = found.tensor
    remedy = Remedy(
        f"without the {size - len(rows)} of {size} samples whose {name} is not finite",
        f"keep = torch.isfinite({name}).reshape({size}, -1).all(1)",
    )
    change = SomeSamples(failure.place, tuple(rows))
    yield functools.partial(trials.attempt, remedy, change)


def _of_scale(failure: Failure, trials: Trials) -> Iterator[Any]:
    """A smaller loss scale where gradients of a scaled loss overflow."""
    scales = [
        float(held.abs().max())
        for call in trials.rerun.calls
        for held in call.held.values()
        if held.numel() == 1
    ]
    if not failure.is_half or not scales or max(scales) <= 1:
        return
    for factor in (2**4, 2**10):
        scale = max(1.0, max(scales) / factor)
        change = ScaledGradients(scale / max(scales))
        remedy = Remedy(
            f"a loss scale of {scale:g} instead of {max(scales):g}",
            f"torch.amp.GradScaler(init_scale={scale:g})",
        )
        yield functools.partial(trials.attempt, remedy, change)
