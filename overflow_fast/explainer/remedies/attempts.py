"""Tries remedies in order, by the cause of a failure: code, dtypes, checkpoints."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...base.modules import module_of_parameter
from ...base.torch_ops import has
from ...base.tree import tensors
from ...guard.report.causes import (
    EMPTY_REDUCTION,
    ROUNDING,
    SINGULAR_GRADIENT,
    UNDEFINED,
    Cause,
)
from ...guard.report.notes import NOT_MEASURED
from ...guard.report.op_words import retell_float64
from ...guard.report.remedy import Elsewhere, Remedy
from ..calls import Call, ModelCall, batch_size, with_stand_in
from ..explain_origin import explain_root_op
from ..named_tensors import names_of
from ..replayer import Patch, Replayer, ReplayResult, StepPart
from ..rounding import NO_HELP
from ..sentinel import outlier_in
from .checkpoints import checkpoint_trials
from .half_dtypes import half_trials
from .patches import (
    ClampedBatch,
    OtherCall,
    OtherWeights,
    ScaledWeights,
    SomeSamples,
    WithoutNumber,
)
from .rule_attempts import (
    cancelled_trials,
    exact_trials,
    guard_trials,
    link_trials,
    lost_trials,
    mask_trials,
    rounded_trials,
    select_trials,
    wider_trials,
)
from .rules import EXACT, IN_LOGARITHMS
from .trials import (
    AppliedPatches,
    Attempts,
    Failure,
    Trial,
    Trials,
    loss_of,
)
from .true_step import distance
from .unwritten import zero_trials
from .written import short_text

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
    models = trials.replayer.models
    root_op = result.root_op(models)
    if root_op is None:
        return None
    found = explain_root_op(root_op, result.table.ops, result.is_in_gradients)
    after = Failure.of(found, root_op, result.table, place)
    after.checkpoints = failure.checkpoints
    return None if after.mark == failure.mark else after


_EAGERLY = (
    "Remedies were tried with compiled code run eagerly; with the compiled code itself "
    "they were not tried."
)
_NONE = "No remedy was found."
_FEW_NAMES = 4
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
    _note_drawn(failure)
    _try_all(failure, trials)
    if not trials.found_remedy:
        trials.renew()
        _go_on(failure, trials, _MOST_TOGETHER - 1)
    _measure_elsewhere(failure, trials)
    trials.go_on(AppliedPatches())
    for trial in _without_sample(failure, trials):
        if trials.allow(1) and trials.may_run():
            trials.attempt(trial)
        else:
            trials.leave_out(trial)
    found.remedies = sorted(
        [*found.remedies, *trials.remedies],
        key=_rank,
    )
    if failure.is_compiled and any(each.tried for each in found.remedies):
        found.notes.insert(0, _EAGERLY)
    found.notes += list(dict.fromkeys(trials.notes))
    is_of_code = "calls" in Cause.of(found.cause).remedies and not failure.is_meant
    if is_of_code and not (found.remedies or trials.notes):
        found.notes.append(_NONE)


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
    elif found.cause == UNDEFINED.name:
        found.evidence = [each.removesuffix(NO_HELP) for each in found.evidence]
        loss = f"its loss is {true_loss:.4g}"
        found.evidence.append(f"the whole step in float64 is finite: {loss}")
        # Equal numbers less one another are 0, and seldom so in float64.
        cancels = ("difference", "deviation")
        is_lost = not any(has(c.name, of) for c in failure.calls for of in cancels)
        if is_lost and found.op is not None and 0.0 in found.op.operands:
            found.cause, found.reason = ROUNDING.name, "it is given 0, none in float64"


def _note_drawn(failure: Failure) -> None:
    """Adds that a 0 was drawn, which uniform numbers include: often in bfloat16."""
    op = failure.found.op
    is_zero = op is not None and 0.0 in op.operands
    made = [value.call for call in failure.failing_calls for value in call.inputs]
    drawn = [call for call in made if call is not None and has(call.name, "unit")]
    if is_zero and drawn and failure.found.cause == UNDEFINED.name:
        text = f"`{short_text(drawn[0])}` drew that 0, which uniform numbers include"
        failure.found.evidence.insert(1, text)


def _rank(remedy: Remedy) -> tuple[Any, ...]:
    """The order of remedies: what is right comes first, then what changes the least.

    That is the distance from the true loss and gradients, then the change of results
    that are finite without it, in this step or in another batch. Of equal ones float64
    is the last: few devices are fast at it.
    """
    return (
        *(remedy.worth, remedy.is_of_data, remedy.is_flat or bool(remedy.leaves)),
        *(remedy.off, remedy.change, not remedy.code),
        remedy.stops_gradient and remedy.true_loss is None,
        remedy.in_float64,
    )


def _measure_elsewhere(failure: Failure, trials: Trials) -> None:
    """Measures how far remedies move loss and gradients where nothing fails.

    That is with the batch of the last clean step, where it is known and finite still;
    else with another sample in place of the one that fails: with the same dropout
    masks, and as many samples. What changes no finite result moves nothing there, and
    a change that is one of this step's samples cannot be made there. What is shown
    first is measured first, and what the budget leaves out is said.
    """
    sample, size = failure.found.sample, failure.found.num_samples
    moving = sorted(
        (
            (patches, remedy)
            for patches, remedy in trials.helped
            if remedy.moves_results != 0
            and all(type(patch).calls is Patch.calls for patch in patches)
        ),
        key=lambda each: _rank(each[1]),
    )
    if not moving:
        return
    if failure.clean is not None and trials.allow(1 + len(moving)):
        clean = OtherCall(failure.clean)
        plain = trials.run_part(StepPart(), [clean]) if trials.may_run() else None
        if plain is not None and _is_whole(plain):
            _measure(trials, moving, plain.held(), StepPart(), [clean])
            return
    if sample is None or size < 2:
        return
    rows = with_stand_in(sample, size)
    others = StepPart(failure.place, rows, has_table=False)
    plain = failure.others
    if plain is None or not plain.has_backward:
        if not trials.may_run():
            trials.notes.append(NOT_MEASURED)
            return
        plain = trials.run_part(others, ())
    if plain is not None and _is_whole(plain):
        _measure(trials, moving, plain.held(), others, (), rows[sample])


def _is_whole(result: ReplayResult) -> bool:
    return result.error is None and result.is_clean and result.has_backward


def _measure(
    trials: Trials,
    moving: Sequence[tuple[Sequence[Patch], Remedy]],
    plain: ReplayResult,
    part: StepPart,
    before: Sequence[Patch],
    stand_in: int | None = None,
) -> None:
    """Measures remedies on a part of the step that is finite without them."""
    for patches, remedy in moving:
        if not trials.may_run():
            is_shown = remedy.is_recommended or not trials.found_remedy
            trials.notes += [NOT_MEASURED] * is_shown
            return
        result = trials.run_part(part, [*before, *patches])
        if result.error is None and not result.is_clean and stand_in is None:
            text = "the last clean batch is not finite with it"
            _replace(trials, remedy, breaks=text)
        elif _is_whole(result):
            moved = distance(result.held().gradients, plain.gradients)
            first, then = loss_of(plain), loss_of(result)
            both = None if first is None or then is None else (first, then)
            _replace(trials, remedy, elsewhere=Elsewhere(moved, both, stand_in))


def _replace(trials: Trials, remedy: Remedy, **changes: Any) -> None:
    """Changes facts of a remedy that was tried."""
    for i, each in enumerate(trials.remedies):
        if _key(each) == _key(remedy):
            trials.remedies[i] = replace(each, **changes)


def _key(remedy: Remedy) -> tuple[str, str, int]:
    return remedy.text, remedy.code, remedy.line


def _try_all(failure: Failure, trials: Trials) -> None:
    """Tries one after another; without a remedy, says what the budget leaves out."""
    if failure.is_meant:
        return
    for applies, makes in _ATTEMPTS:
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
    """Tries further remedies besides those that have uncovered another failure."""
    applied, seen = trials.applied, set[Any]()
    for trial, place in trials.failed:
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


def _drop_bad_samples(failure: Failure, trials: Trials) -> Attempts:
    """The step without the samples that are not finite."""
    found = failure.found
    if trials.found_remedy:
        return
    size, bad = batch_size(trials.calls[failure.place]), failure.bad
    if not trials.replayer.ranks.can_cut(failure.place):
        return
    if size is None or bad is None or not bad.dim() or len(bad) != size:
        return
    rows = bad.detach().isfinite().reshape(size, -1).all(1).nonzero().flatten().tolist()
    if not rows:
        return
    name = found.tensor
    yield from _clamp_to_least(bad, failure)
    mask = f"torch.isfinite({name}).reshape(len({name}), -1).all(1)"
    remedy = Remedy(
        f"drop the {size - len(rows)} of {size} samples whose {name} is not finite",
        _dropping_code(trials.calls[failure.place], mask),
        is_of_data=True,
    )
    yield Trial(remedy, SomeSamples(failure.place, tuple(rows)))


def _clamp_to_least(bad: torch.Tensor, failure: Failure) -> Iterator[Trial]:
    """The least finite number in place of -inf alone, as a logarithm of 0 gives it.

    Not in a mask, which has one finite number.
    """
    is_low, finite = bad == -math.inf, bad[bad.isfinite()]
    is_mask = not finite.numel() or bool(finite.min() == finite.max())
    if is_mask or int(is_low.sum()) != bad.numel() - finite.numel():
        return
    name, low = failure.found.tensor, float(f"{float(finite.min()):.4g}")
    code = f"{name}.clamp_(min={low:g})"  # in a tuple, too
    if name.isidentifier():
        code = f"{name} = {name}.clamp(min={low:g})"
    words = f"clamp `{name}` to at least {low:g}, its least finite number"
    remedy = Remedy(words, code, is_of_data=True)
    yield Trial(remedy, ClampedBatch(failure.place, name, low, math.inf))


def _without_sample(failure: Failure, trials: Trials) -> Iterator[Trial]:
    """The step without the one sample that fails, and with smaller numbers in it."""
    sample, size, place = failure.found.sample, failure.found.num_samples, failure.place
    if sample is None or size < 2 or not trials.replayer.ranks.can_cut(place):
        return
    if failure.found.phase == "data":
        return
    call = trials.replayer.calls[place]
    outlier = outlier_in(call, sample) if sample.outlier else None
    rows = tuple(i for i in range(size) if i != sample)
    text, code = f"leave sample {int(sample)} out of this batch", ""
    if outlier is not None:
        name, bound = outlier.name, outlier.bound
        text = f"leave out samples whose `{name}` is above {bound:g} in magnitude"
        mask = f"{name}.abs().reshape(len({name}), -1).amax(1) <= {bound:g}"
        code = _dropping_code(call, mask)
        usual = outlier.usual
        clamped = f"{name}.clamp_(-{usual:g}, {usual:g})"  # in a tuple, too
        if name.isidentifier():
            clamped = f"{name} = {name}.clamp(-{usual:g}, {usual:g})"
        words = f"clamp `{name}` to {usual:g} in magnitude"
        remedy = Remedy(words, clamped, is_of_data=True)
        yield Trial(remedy, ClampedBatch(place, name, -usual, usual))
    remedy = Remedy(text, code, is_of_data=True)
    yield Trial(remedy, SomeSamples(place, rows))


def _dropping_code(call: Call, mask: str) -> str:
    """The code that leaves samples out of a batch, or "" where it is none of a line.

    Args:
        call: The call with the batch.
        mask: The expression for those that are kept.
    """
    lines = [f"keep = {mask}"]
    for name, value in call.variables().items():
        parts = list(value.values()) if type(value) is dict else value
        parts = [parts] if isinstance(parts, torch.Tensor) else parts
        if not any(isinstance(each, torch.Tensor) for _, each in tensors(value)):
            continue
        if type(parts) not in (list, tuple) or not all(map(_has_samples, parts)):
            return ""
        if isinstance(value, torch.Tensor):
            lines.append(f"{name} = {name}[keep]")
        elif type(value) is dict:
            lines.append(f"{name} = {{k: v[keep] for k, v in {name}.items()}}")
        else:
            kept = f"each[keep] for each in {name}"
            lines.append(
                f"{name} = "
                + (f"[{kept}]" if type(value) is list else f"tuple({kept})")
            )
    if isinstance(call, ModelCall):
        lines[-1] += "  # and what belongs to it, such as labels"
    return "\n".join(lines)


def _has_samples(each: Any) -> bool:
    return isinstance(each, torch.Tensor) and each.dim() > 0


def _replace_sentinel(failure: Failure, trials: Trials) -> Attempts:
    """The step with 0 in place of a number that looks like a placeholder."""
    sentinel = failure.sentinel
    if sentinel is None or not sentinel.can_be_replaced:
        return
    if not trials.replayer.ranks.is_alone:
        return
    name, number = sentinel.name, sentinel.number
    code = f"{name}.masked_fill_({name} == {number!r}, 0)"  # in a tuple, too
    if name.isidentifier():
        code = f"{name} = {name}.masked_fill({name} == {number!r}, 0)"
    remedy = Remedy(f"replace {number:.6g} in `{name}` by 0", code, is_of_data=True)
    yield Trial(remedy, WithoutNumber(failure.place, number))


def _try_smaller_weights(failure: Failure, trials: Trials) -> Attempts:
    """Smaller weights where results grow with each call, as another init gives them."""
    growth = failure.growth
    if growth is None:
        return
    names = [
        name
        for kind, name, tensor in names_of(trials.replayer.models)
        if kind == "parameter" and tensor.dim() > 1
        if module_of_parameter(name) in growth.modules
    ]
    if not names or len(trials.replayer.models) > 1:
        return
    factor = float(f"{0.95 / growth.factor:.2g}")
    weights = names[0] if len(names) == 1 else f"{len(names)} weights"
    remedy = Remedy(
        f"multiply {weights} by {factor:g}, as a smaller initialization does",
        _scaling_code(names, factor, trials),
    )
    yield Trial(remedy, ScaledWeights(dict.fromkeys(names, factor)))


def _repair_weights(failure: Failure, trials: Trials) -> Attempts:
    """Other values for what a layer holds, and cannot be computed with."""
    module, op = failure.found.module, failure.found.op
    if op is None or len(trials.replayer.models) > 1:
        return
    for _, name, tensor in names_of(trials.replayer.models):
        owner, _, own = name.rpartition(".")
        if "batch_norm" in op.name and owner == module and own == "running_var":
            is_bad = tensor < 0
            text = f"set the negative values of {name} to 1, as in a new layer"
            remedy = Remedy(text, _NEGATIVE.format(name))
            if bool(is_bad.any()):
                value = tensor.detach().masked_fill(is_bad, 1)
                yield Trial(remedy, OtherWeights({name: value}))
        # A parametrization is a module below what owns the weights.
        is_near = owner == module or module.startswith(f"{owner}.")
        if "weight_norm" in op.name and is_near and own in _DIRECTIONS:
            is_bad = tensor.detach().flatten(1).norm(dim=1) == 0
            text = f"fill rows of {name} that are 0 with small random numbers"
            remedy = Remedy(text, _ZERO_ROWS.format(name))
            if bool(is_bad.any()):
                value = tensor.detach().clone()
                generator = torch.Generator().manual_seed(0)  # not the program's
                rows = torch.randn(value[is_bad].shape, generator=generator)
                value[is_bad] = 0.02 * rows.to(value)
                yield Trial(remedy, OtherWeights({name: value}))


_NEGATIVE = 'v = model.get_buffer("{}"); v[v < 0] = 1'
_DIRECTIONS = ("weight_v", "original1")  # of both kinds of weight_norm
_ZERO_ROWS = (
    'v = model.get_parameter("{}").data\n'
    "is_zero = v.flatten(1).norm(dim=1) == 0\n"
    "v[is_zero] = 0.02 * torch.randn_like(v[is_zero])"
)


def _scaling_code(names: list[str], factor: float, trials: Trials) -> str:
    """The code that multiplies weights: by a pattern, where there are many."""
    patterns = {re.sub(r"\d+", r"\\d+", re.escape(name)) for name in names}
    pattern = "|".join(sorted(patterns))
    all_names = [name for _, name, _ in names_of(trials.replayer.models)]
    alike = [name for name in all_names if re.fullmatch(pattern, name)]
    if len(names) > _FEW_NAMES and sorted(alike) == sorted(names):
        return (
            "for name, weight in model.named_parameters():\n"
            f'    if re.fullmatch(r"{pattern}", name):\n'
            f"        weight.data.mul_({factor:g})"
        )
    scale = f".data.mul_({factor:g})"
    if len(names) == 1:
        return f'model.get_parameter("{names[0]}"){scale}'
    return f"for name in {names}: model.get_parameter(name){scale}"


# What is tried, in order.


def _tries(kind: str) -> Callable[[Failure], bool]:
    return lambda failure: kind in Cause.of(failure.found.cause).remedies


def _is_given(failure: Failure) -> bool:
    """True if no operation made the bad value: it was there."""
    return failure.op is None


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
# Each with the failures that it is for, those first that change the least.
_ATTEMPTS: tuple[
    tuple[Callable[[Failure], bool], Callable[[Failure, Trials], Attempts]], ...
] = (
    (_is_given, zero_trials),
    (_tries("samples"), select_trials),
    (_tries("samples"), _drop_bad_samples),
    (_has_calls, _replace_sentinel),
    (_tries("checkpoints"), checkpoint_trials),
    (_has_calls, functools.partial(exact_trials, rules=EXACT)),
    (_has_calls, select_trials),
    (_overflows_half, wider_trials),
    (_is_lost, cancelled_trials),
    (_has_calls, functools.partial(exact_trials, rules=IN_LOGARITHMS)),
    (_is_full, wider_trials),
    (_is_lost, mask_trials),
    (_is_lost, rounded_trials),
    (_is_lost, link_trials),
    (_has_calls, guard_trials),
    (_is_lost, lost_trials),
    (_has_calls, half_trials),
    (_rounds_half, wider_trials),
    (_overflows_half, functools.partial(wider_trials, in_words=True)),
    (_overflows, _try_smaller_weights),
    (_tries("weights"), _repair_weights),
)
