"""Tries remedies in order, by the cause of a failure."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from ..explanation import Remedy
from ..parts import batch_size
from ..rerun import Rerun
from .changes import ScaledGradients, SomeSamples
from .checkpoints import of_checkpoints
from .failure import Failure
from .further import uncovered
from .ground import Trial
from .line_edit import NotEditableError
from .lines import of_line
from .products import of_products
from .trials import Trials
from .wider_dtypes import of_precision

_LINES = ("range overflow", "undefined", "singular gradient", "empty reduction")
_EAGERLY = (
    "Remedies were tried with compiled code run eagerly; with the compiled code itself "
    "they were not tried."
)
_MOST_TOGETHER = 3  # changes that are needed at once


def find_remedies(
    failure: Failure, rerun: Rerun, budget: int, step_seconds: float
) -> None:
    """Tries remedies on the step, and adds them to its explanation.

    Where one makes the failure go, and another one in the same step comes to light, the
    search goes on from there with that remedy in place.

    Args:
        failure: The failure.
        rerun: Runs the step; its state is kept.
        budget: How many forwards may be run, and as many again to go on.
        step_seconds: How long a plain replay took.
    """
    trials = Trials(rerun, budget, step_seconds, failure.is_compiled)
    _try_all(failure, trials)
    if not trials.has_helped:
        trials.renew()
        _go_on(failure, trials, _MOST_TOGETHER - 1)
    found = failure.found
    found.remedies = sorted(trials.remedies, key=lambda each: not each.is_finite)
    if failure.is_compiled and any(each.tried for each in found.remedies):
        found.notes.insert(0, _EAGERLY)
    found.notes += list(dict.fromkeys(trials.notes))


def _try_all(failure: Failure, trials: Trials) -> None:
    for attempts in _attempts(failure, trials):
        try:
            for attempt in attempts:
                if trials.is_over:
                    return
                attempt()
        except NotEditableError as error:
            trials.notes.append(f"A change of the line was not tried: {error}.")


def _go_on(failure: Failure, trials: Trials, most: int) -> None:
    """Tries further remedies on those that have uncovered another failure."""
    ground, failed = trials.ground, trials.failed
    seen = set[Any]()
    for trial, place in failed:
        if trials.is_over or not most:
            return
        trials.go_on(ground.after(trial))
        after = uncovered(failure, trials, trial, place)
        if after is None or after.mark in seen:
            continue
        seen.add(after.mark)
        _try_all(after, trials)
        if not trials.has_helped:
            _go_on(after, trials, most - 1)


def _attempts(failure: Failure, trials: Trials) -> Iterator[Iterator[Any]]:
    """The changes to try, those that change the least first."""
    cause = failure.found.cause
    if cause == "bad data":
        yield _of_data(failure, trials)
    if cause in ("bad weights", "divergence"):
        yield of_checkpoints(failure.checkpoints, trials)
    if cause == "range overflow":
        yield of_products(failure, trials)
        yield of_precision(failure, trials)
    if cause in _LINES:
        yield of_line(failure, trials)
    if cause == "range overflow" and failure.found.phase == "backward":
        yield _of_scale(failure, trials)


def _of_data(failure: Failure, trials: Trials) -> Iterator[Any]:
    """The step without the samples that are not finite."""
    found = failure.found
    size, bad = batch_size(trials.calls[failure.place]), failure.bad
    if not trials.rerun.team.can_cut(failure.place):
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
    yield functools.partial(trials.attempt, Trial(remedy, change))


def _of_scale(failure: Failure, trials: Trials) -> Iterator[Any]:
    """A smaller loss scale where gradients of a scaled loss overflow."""
    scales = [
        float(held.abs().max())
        for call in trials.calls
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
        yield functools.partial(trials.attempt, Trial(remedy, change))
