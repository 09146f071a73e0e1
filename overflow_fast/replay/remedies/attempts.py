"""Tries remedies in order, by the cause of a failure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..capture import batch_size
from ..explanation import Remedy
from ..finding import explain_root_op
from ..replayer import Replayer
from ..slice import ForwardRows, find_root_op
from .checkpoints import try_checkpoints
from .line_edit import NotEditableError
from .line_forms import expression_of, line_rewrites, product_rewrites
from .patches import ScaledGradients, SomeSamples
from .trials import Attempts, Failure, Trial, Trials
from .wider_dtypes import try_wider_dtypes

# Finds the failure that is left once a remedy is in place.


def remaining_failure(
    failure: Failure, trials: Trials, trial: Trial, place: int
) -> Failure | None:
    """Replays the step with a remedy in place; returns the failure that is left.

    Args:
        failure: The failure that the remedy was tried for.
        trials: The trials; the remedy is in place.
        trial: The remedy.
        place: The place of the call that was bad with it.

    Returns:
        The failure; None if it is the same one still, or is not known.
    """
    if place < 0:
        return None
    result = trials.run(trials.applied.patches, traced=place)
    if result.error is not None or result.table is None:
        return None
    models = trials.replayer.models
    root_op = find_root_op(result, models)
    if root_op is None:
        return None
    rows = ForwardRows(result.table)
    found = explain_root_op(root_op, rows, result.is_in_gradients)
    after = Failure.of(found, root_op, result.table, place)
    after.checkpoints = failure.checkpoints
    return None if _is_same(failure, after, trials, trial) else after


def _is_same(failure: Failure, after: Failure, trials: Trials, trial: Trial) -> bool:
    """Tells whether the same expression fails still, as it was or in its new form."""
    if after.mark != failure.mark:
        return False
    if after.row is None or trial.source is None:
        return True
    source, node = expression_of(after.row, trials.applied)
    text = "" if source is None or node is None else source.text_of(node)
    return not text or any(text in each for each in trial.texts)


_LINES = ("range overflow", "undefined", "singular gradient", "empty reduction")
_EAGERLY = (
    "Remedies were tried with compiled code run eagerly; with the compiled code itself "
    "they were not tried."
)
_MOST_TOGETHER = 3  # changes that are needed at once


def find_remedies(
    failure: Failure, replayer: Replayer, budget: int, step_seconds: float
) -> None:
    """Tries remedies on the step, and adds them to its explanation.

    Where one makes the failure go, and another one in the same step comes to light, the
    search goes on from there with that remedy in place.

    Args:
        failure: The failure.
        replayer: Runs the step; its state is kept.
        budget: How many forwards may be run, and as many again to go on.
        step_seconds: How long a plain replay took.
    """
    trials = Trials(replayer, budget, step_seconds, failure.is_compiled)
    _try_all(failure, trials)
    if not trials.found_remedy:
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
            trial = next(attempts, None)
            while trial is not None:
                if trials.is_over:
                    return
                trial = attempts.send(trials.attempt(trial))
        except StopIteration:
            continue
        except NotEditableError as error:
            trials.notes.append(f"A change of the line was not tried: {error}.")


def _go_on(failure: Failure, trials: Trials, most: int) -> None:
    """Tries further remedies besides those that have uncovered another failure."""
    applied, failed = trials.applied, trials.failed
    seen = set[Any]()
    for trial, place in failed:
        if trials.is_over or not most:
            return
        trials.go_on(applied.after(trial))
        after = remaining_failure(failure, trials, trial, place)
        if after is None or after.mark in seen:
            continue
        seen.add(after.mark)
        _try_all(after, trials)
        if not trials.found_remedy:
            _go_on(after, trials, most - 1)


def _attempts(failure: Failure, trials: Trials) -> Iterator[Attempts]:
    """The patches to try, those that change the least first."""
    cause = failure.found.cause
    if cause == "bad data":
        yield _drop_bad_samples(failure, trials)
    if cause in ("bad weights", "divergence"):
        yield try_checkpoints(failure.checkpoints, trials)
    if cause == "range overflow":
        yield product_rewrites(failure, trials)
        yield try_wider_dtypes(failure, trials)
    if cause in _LINES:
        yield line_rewrites(failure, trials)
    if cause == "range overflow" and failure.found.phase == "backward":
        yield _try_loss_scales(failure, trials)


def _drop_bad_samples(failure: Failure, trials: Trials) -> Attempts:
    """The step without the samples that are not finite."""
    found = failure.found
    size, bad = batch_size(trials.calls[failure.place]), failure.bad
    if not trials.replayer.ranks.can_cut(failure.place):
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
    yield Trial(remedy, SomeSamples(failure.place, tuple(rows)))


def _try_loss_scales(failure: Failure, trials: Trials) -> Attempts:
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
        remedy = Remedy(
            f"a loss scale of {scale:g} instead of {max(scales):g}",
            f"torch.amp.GradScaler(init_scale={scale:g})",
        )
        yield Trial(remedy, ScaledGradients(scale / max(scales)))
