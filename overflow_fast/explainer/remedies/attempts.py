"""Tries remedies in order, by the cause of a failure.

1. The step in float64 gives its true loss and gradients, where it can be run so.
2. Of `_ATTEMPTS` those apply that are for such a failure; each yields `Trial`s, which
   `Trials` runs and judges, until enough have helped or the budget is spent.
3. Where none has, a trial may have uncovered another failure: with it in place the
   search goes on from that one.
4. What has helped is measured where nothing fails, and what was tried is ranked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...base.torch_ops import has
from ...guard.report.causes import (
    CONSTANT,
    EMPTY_REDUCTION,
    ROUNDING,
    SINGULAR_GRADIENT,
    UNDEFINED,
    Cause,
)
from ...guard.report.notes import NOT_MEASURED
from ...guard.report.op_words import retell_float64
from ...guard.report.remedy import Elsewhere, Remedy
from ..bounds import tolerance
from ..explain_origin import explain_root_op
from ..replayer import Patch, Replayer, ReplayResult
from ..rounding import NO_HELP
from .failure import Failure
from .half_dtypes import half_trials
from .option_trials import option_trials
from .patches import OtherCall, SomeSamples
from .rule_attempts import (
    INSTALLED,
    earlier_trials,
    exact_trials,
    given_trials,
    guard_trials,
    link_trials,
    lost_trials,
    masked_trials,
    select_trials,
    smoothed_trials,
)
from .sample_trials import dropping_trials, sentinel_trials, without_sample
from .trials import AppliedPatches, Attempts, Trials, Tried, loss_of
from .true_step import distance
from .weight_trials import repair_trials, smaller_trials
from .wider_trials import wider_trials

# Finds the failure that is left once a remedy is in place.


def remaining_failure(failure: Failure, trials: Trials, place: int) -> Failure | None:
    """Replays the step with a remedy in place; returns the failure that is left.

    Args:
        failure: The failure that the remedy was tried for.
        trials: The trials; the remedy is in place.
        place: The place of the call that was bad with it.

    Returns:
        The failure; None if it is the same one still, or is not known.
    """
    if place < 0:
        return None
    result = trials.run(trials.applied.patches, traced=place)
    if result.error is not None or result.table is None:
        return None
    root_op = result.root_op()
    if root_op is None:
        return None
    found = explain_root_op(root_op, result.table.ops, result.is_in_gradients)
    after = Failure.of(found, root_op, result.table, place)
    return None if after.mark == failure.mark else after


_EAGERLY = (
    "Remedies were tried with compiled code run eagerly; with the compiled code itself "
    "they were not tried."
)
_NONE = "No remedy was found."
_BEYOND = (
    "its argument is {:.3g} outside of the domain, more than rounding explains, and a "
    "clamp would hide that"
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
        budget: How many replays may be run, and as many again to go on.
        step_seconds: How long a plain replay took.
    """
    found = failure.found
    trials = Trials(failure, replayer, budget, step_seconds)
    if "calls" in Cause.of(found.cause).remedies and not failure.is_meant:
        trials.find_truth()
    # What the step leaves out may be as bad in float64.
    if trials.truth is not None and not failure.stays_within:
        note_rounding(failure, trials.truth.loss)
    if failure.beyond_pole and not found.reason:
        found.reason = _BEYOND.format(failure.beyond_pole)
    _try_all(failure, trials)
    if not trials.found_remedy:
        trials.renew()
        _go_on(failure, trials, _MOST_TOGETHER - 1)
        _try_alone(trials)
    _measure_elsewhere(failure, trials)
    near = 0.0 if failure.half is None else tolerance([failure.half])
    tried = [*found.remedies, *trials.remedies]
    found.remedies = sorted(tried, key=lambda each: _rank(each, near))
    if failure.is_compiled and any(each.tried for each in found.remedies):
        found.notes.insert(0, _EAGERLY)
    found.notes += list(dict.fromkeys(trials.notes))
    is_of_code = "calls" in Cause.of(found.cause).remedies and not failure.is_meant
    if is_of_code and not (found.remedies or trials.notes):
        found.notes.append(_NONE)


_WHOLE = "the whole step in float64 is finite: its loss is {:.4g}"
_OPEN = (UNDEFINED.name, SINGULAR_GRADIENT.name)


def note_rounding(failure: Failure, true_loss: float) -> None:
    """Corrects a cause by the whole step in float64, which is finite.

    No operation of complex numbers is run again in float64 for itself, nor is one that
    divides by a sum of 0.
    """
    found = failure.found
    is_open = failure.is_complex and found.cause in _OPEN
    if is_open or found.cause == EMPTY_REDUCTION.name:
        found.cause = ROUNDING.name
        op = found.op
        dtype = "" if op is None else f" in {[*op.inputs, *op.outputs][0].dtype}"
        text = "the whole step in float64 is finite: a number before it was rounded"
        retell_float64(found.evidence, f"{text} away{dtype}")
    elif found.cause in _OPEN:
        found.evidence = [each.removesuffix(NO_HELP) for each in found.evidence]
        found.evidence.append(_WHOLE.format(true_loss))
        # Equal numbers less one another are 0, and seldom so in float64.
        cancels = ("difference", "deviation")
        is_lost = not any(has(c.name, of) for c in failure.calls for of in cancels)
        if is_lost and found.op is not None and 0.0 in found.op.operands:
            found.cause, found.reason = ROUNDING.name, "it is given 0, none in float64"
    elif found.cause == CONSTANT.name:  # a condition that float64 does not meet
        found.reason = f"{found.reason}, and {_WHOLE.format(true_loss)}"


def _rank(remedy: Remedy, near: float = 0.0) -> tuple[Any, ...]:
    """The order of remedies: what is right comes first, then what changes the least.

    That is the distance from the true loss and gradients, then the change of results
    that are finite without it, in this step or in another batch. Of equal ones float64
    is the last: few devices are fast at it, and it often takes several lines. A loss
    that is far beyond the last ones comes after all that are not.

    Args:
        remedy: The remedy.
        near: What the rounding of a half precision changes anyway, and is none.
    """
    change = remedy.change if remedy.change > near else 0.0
    return (
        *(remedy.worth, remedy.usual is not None),
        *(_is_of_torch(remedy), remedy.is_of_data),
        remedy.is_flat or bool(remedy.leaves),
        *(remedy.off, change, not remedy.code),
        remedy.stops_gradient and remedy.true_loss is None,
        remedy.in_float64,
    )


def _is_of_torch(remedy: Remedy) -> bool:
    """True for a change of torch's own lines, which nobody makes, least of all two."""
    return not remedy.code and remedy.text.endswith(INSTALLED)


def _measure_elsewhere(failure: Failure, trials: Trials) -> None:
    """Measures how far remedies move loss and gradients where nothing fails.

    That is with the batch of the last clean step, where it is known and finite still;
    else in this step without the sample that fails, which is the trial of that remedy,
    too. What changes no finite result moves nothing there, and a change that is one of
    this step's samples cannot be made there. What is shown first is measured first, and
    what the budget leaves out is said.
    """
    moving = sorted(
        (
            each
            for each in trials.tried
            if each.remedy.keeps_running
            and each.remedy.moves_results != 0
            and all(type(patch).calls is Patch.calls for patch in each.patches)
        ),
        key=lambda each: _rank(each.remedy),
    )
    if moving and failure.clean is not None and trials.allow(1 + len(moving)):
        clean = OtherCall(failure.clean)
        if trials.may_run() and _measure(trials, moving, trials.run([clean]), clean):
            moving = []
    sample, size, place = failure.found.sample, failure.found.num_samples, failure.place
    if sample is None or size < 2 or not trials.replayer.ranks.can_cut(place):
        return
    trials.go_on(AppliedPatches())
    without = SomeSamples(place, tuple(i for i in range(size) if i != sample))
    plain = failure.others
    for trial in without_sample(failure, trials, without):
        if plain is not None and trial.patch is without:
            trials.attempt(trial, plain)
        elif trials.allow(1) and trials.may_run():
            trials.attempt(trial)
        else:
            trials.leave_out(trial)
    if moving and plain is not None:
        _measure(trials, moving, plain, without, int(sample))


def _measure(
    trials: Trials,
    moving: Sequence[Tried],
    plain: ReplayResult,
    elsewhere: Patch,
    left_out: int | None = None,
) -> bool:
    """Measures remedies on a step that is finite without them; else returns False.

    Args:
        trials: The trials.
        moving: The remedies.
        plain: The replay of that step.
        elsewhere: Makes that step of the one that failed.
        left_out: See `Elsewhere`.
    """
    if not _is_whole(plain):
        return False
    for each in moving:
        if not trials.may_run():
            is_shown = each.remedy.is_recommended or not trials.found_remedy
            trials.notes += [NOT_MEASURED] * is_shown
            break
        result = trials.run([elsewhere, *each.patches])
        if result.error is None and not result.is_clean and left_out is None:
            text = "the last clean batch is not finite with it"
            each.remedy = replace(each.remedy, breaks=text)
        elif _is_whole(result):
            moved = distance(result.gradients, plain.gradients)
            first, then = loss_of(plain), loss_of(result)
            both = None if first is None or then is None else (first, then)
            found = Elsewhere(moved, both, left_out)
            each.remedy = replace(each.remedy, elsewhere=found)
    return True


def _is_whole(result: ReplayResult) -> bool:
    return result.error is None and result.is_clean and result.has_backward


def _try_all(failure: Failure, trials: Trials) -> None:
    """Tries one after another; without a remedy, says what the budget leaves out."""
    for applies, makes in _OF_MEANT if failure.is_meant else _ATTEMPTS:
        if trials.is_over and trials.found_remedy:
            return
        if not applies(failure):
            continue
        attempts = makes(failure, trials)
        try:
            trial = next(attempts, None)
            while trial is not None and not trials.is_over:
                trial = attempts.send(trials.attempt(trial))
        except StopIteration:
            continue
        if trial is not None and not trials.found_remedy:
            trials.leave_out(trial)
            return


def _go_on(failure: Failure, trials: Trials, most: int) -> None:
    """Tries further remedies besides those that have uncovered another failure.

    First besides those that change the most calls: fewer are left that may fail.
    """
    applied, seen = trials.applied, set[Any]()
    failed = [each for each in trials.failed if not _is_of_torch(each[0].remedy)]
    for trial, place in sorted(failed, key=lambda each: -len(each[0].changes)):
        if trials.is_over or not most:
            return
        trials.go_on(applied.with_trial(trial))
        after = remaining_failure(failure, trials, place)
        if after is None or after.mark in seen:
            continue
        seen.add(after.mark)
        _try_all(after, trials)
        if not trials.found_remedy:
            _go_on(after, trials, most - 1)


def _try_alone(trials: Trials) -> None:
    """Tries what has helped besides other changes without them.

    A change of what made a bad number may do without one of what was given it.
    """
    helped = [each for each in trials.tried if each.remedy.is_recommended]
    trials.go_on(AppliedPatches())
    may_try = helped and trials.allow(1) and trials.may_run()
    if may_try and trials.attempt(helped[0].trial):
        alone = trials.tried.pop()
        if _rank(alone.remedy) <= _rank(helped[0].remedy):
            trials.tried.remove(helped[0])
        trials.tried.insert(0, alone)  # the first of those as good


# What is tried, in order.


def _tries(kind: str) -> Callable[[Failure], bool]:
    return lambda failure: kind in Cause.of(failure.found.cause).remedies


def _overflows(failure: Failure) -> bool:
    return failure.found.is_overflow


def _is_lost(failure: Failure) -> bool:
    """True if a call has no value, or was given a wrong one: no range helps it."""
    return _has_calls(failure) and not failure.found.is_overflow


def _overflows_half(failure: Failure) -> bool:
    return failure.found.is_overflow and failure.half is not None


def _rounds_half(failure: Failure) -> bool:
    return _is_lost(failure) and failure.half is not None


def _is_full(failure: Failure) -> bool:
    """True for calls whose next wider dtype is float64."""
    return _has_calls(failure) and failure.half is None


_has_calls = _tries("calls")
_OF_MEANT = ((_has_calls, smoothed_trials),)
# Each with the failures that it is for, those first that change the least.
_ATTEMPTS: tuple[
    tuple[Callable[[Failure], bool], Callable[[Failure, Trials], Attempts]], ...
] = (
    (_tries("samples"), select_trials),
    (_tries("samples"), dropping_trials),
    (_has_calls, sentinel_trials),
    (_has_calls, exact_trials),
    (_has_calls, select_trials),
    (_overflows_half, wider_trials),
    (_is_full, wider_trials),
    (_is_lost, option_trials),
    (_is_lost, earlier_trials),
    (_is_lost, link_trials),
    (_is_lost, given_trials),
    (_is_lost, masked_trials),
    (_has_calls, guard_trials),
    (_is_lost, lost_trials),
    (_has_calls, half_trials),
    (_rounds_half, wider_trials),
    (_overflows, smaller_trials),
    (_tries("weights"), repair_trials),
)
