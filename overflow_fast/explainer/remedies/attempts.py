"""Tries remedies in order, by the cause of a failure: code, dtypes, checkpoints."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...base.modules import module_of_parameter, named_modules, parameters_of
from ...base.torch_ops import has
from ...base.tree import tensors
from ...guard.report.causes import (
    BAD_DATA,
    BAD_WEIGHTS,
    EMPTY_REDUCTION,
    ROUNDING,
    SINGULAR_GRADIENT,
    UNDEFINED,
    Cause,
)
from ...guard.report.remedy import SAME, Remedy
from ..calls import Call, ModelCall, batch_size, with_stand_in
from ..explain_origin import CARRIED, explain_root_op
from ..named_tensors import names_of
from ..replayer import Patch, Replayer, ReplayResult, StepPart
from ..rounding import NO_HELP
from ..sentinel import Sentinel, outlier_in
from ..trace_back import RootOp
from .keep_in_fp32 import has_forward
from .patches import (
    ClampedBatch,
    Float32Modules,
    InDtype,
    OtherCall,
    OtherWeights,
    ScaledGradients,
    ScaledWeights,
    SomeSamples,
    WithoutBad,
    WithoutNumber,
    kept_at,
)
from .rule_attempts import (
    cancelled_trials,
    divisor_trials,
    empty_row_trials,
    exact_trials,
    float32_trials,
    float64_trials,
    guard_trials,
    link_trials,
    lost_trials,
    mask_trials,
    rounded_trials,
    select_trials,
    value_trials,
)
from .rules import EXACT, IN_LOGARITHMS
from .trials import (
    AppliedPatches,
    Attempts,
    Failure,
    Trial,
    Trials,
    least_that_helps,
    loss_of,
)
from .true_step import distance
from .written import short_text

# Tries wider dtypes where float16 has overflowed.


def try_wider_dtypes(failure: Failure, trials: Trials) -> Attempts:
    """Wider dtypes where float16 has overflowed."""
    models = trials.replayer.models
    if not failure.is_half:
        return
    from .spans import try_spans  # no float32 needs it

    owners = [p for p in models if failure.found.module.startswith(p)]
    if len(models) == 1 or owners:
        prefix = max(owners or models, key=len)
        model, name = models[prefix], code_name(prefix)
        names = _around(model, failure.found.module.removeprefix(prefix))
        yield from _try_modules(prefix, name, names[:1], trials)
        yield from try_spans(failure, trials, prefix, name)
        yield from _try_modules(prefix, name, names[1:], trials)
    text, code = _bfloat16_text(failure, trials)
    if text:
        yield Trial(Remedy(text, code), InDtype(torch.bfloat16))
    elif not _is_cast(failure):  # which is none of autocast's
        code = "torch.autocast(device_type, dtype=torch.bfloat16)"
        remedy = Remedy("use bfloat16 for autocast", code)
        yield Trial(remedy, InDtype(torch.bfloat16))


def code_name(prefix: str) -> str:
    """The name that code has for a model, by what its modules' names begin with."""
    name = prefix.rstrip(".")
    return name if name.isidentifier() else "model"


def _is_cast(failure: Failure) -> bool:
    """True if the program's own cast overflowed."""
    return any(call.name == "to" for call in failure.failing_calls[:1])


def _bfloat16_text(failure: Failure, trials: Trials) -> tuple[str, str]:
    """Describes bfloat16 for the weights and the batch; "" where they are not half."""
    call, models = trials.calls[failure.place], trials.replayer.models
    names = [n for n, tensor in call.leaves() if tensor.dtype == torch.float16]
    parameters = [each for model in models.values() for each in parameters_of(model)]
    is_half = any(each.dtype == torch.float16 for each in parameters)
    is_autocast = any(is_on for _, is_on, _ in call.ambient.autocast)
    if not is_half and (is_autocast or not names):
        return "", ""
    casts = [f"{name} = {name}.to(torch.bfloat16)" for name in names]
    if not is_half:
        return "use bfloat16 for the inputs", "\n".join(casts)
    text = f"use bfloat16 for the model{' and its inputs' * bool(names)}"
    code = list(map(code_name, models))
    return text, "\n".join([*(f"{m}.to(torch.bfloat16)" for m in code), *casts])


def _try_modules(prefix: str, model: str, names: list[str], trials: Trials) -> Attempts:
    """The smallest module around the operation that helps in float32, by halving."""

    def trial_of(num: int) -> Trial:
        name = names[num - 1]
        code = f'overflow_fast.keep_in_fp32({model}, ["{name}"])'
        remedy = Remedy(f"run {name} in float32", code, modules=(name,))
        return Trial(remedy, Float32Modules(prefix, (name,)))

    yield from least_that_helps(len(names), trial_of, trials)


def _around(model: torch.nn.Module, name: str) -> list[str]:
    """A module's name and those of the modules around it that are called."""
    names, modules = [], dict(named_modules(model))
    while name:
        module = modules.get(name)
        if module is not None and has_forward(module):
            names.append(name)
        name = name.rpartition(".")[0]
    return names


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
_NONE_TRIED = (
    "No remedy was tried: the budget of a replay, in forwards or in seconds, was spent."
)
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
    found.remedies = sorted(
        [*found.remedies, *trials.remedies],
        key=_rank,
    )
    if failure.is_compiled and any(each.tried for each in found.remedies):
        found.notes.insert(0, _EAGERLY)
    found.notes += list(dict.fromkeys(trials.notes))
    is_of_code = "calls" in Cause.of(found.cause).remedies and not failure.is_meant
    if is_of_code and not (found.remedies or trials.notes):
        found.notes.append(_NONE if trials.may_run() else _NONE_TRIED)


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
        dtype = "" if found.op is None else f" in {found.op.inputs[0].dtype}"
        found.evidence[1:2] = [
            "the whole step in float64 is finite: a number before it was rounded "
            f"away{dtype}"
        ]
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
    made = [value.call for call in failure.failing_calls[:1] for value in call.inputs]
    drawn = [call for call in made if call is not None and has(call.name, "unit")]
    if is_zero and drawn and failure.found.cause == UNDEFINED.name:
        text = f"`{short_text(drawn[0])}` drew that 0, which uniform numbers include"
        failure.found.evidence.insert(1, text)


def _rank(remedy: Remedy) -> tuple[Any, ...]:
    """The order of remedies: what is right and plain comes first."""
    return (
        *(remedy.worth, remedy.is_of_data, _error(remedy) > 0),
        *(remedy.is_flat, bool(remedy.leaves)),
        _error(remedy),
        (remedy.moves_results or 0.0) > SAME,
        *(remedy.changes_others, _is_long(remedy)),
        remedy.stops_gradient and remedy.true_loss is None,
        not remedy.code,
    )


_LONG = 140  # characters of a line, beyond which it is hard to read; chosen


def _is_long(remedy: Remedy) -> bool:
    return not remedy.code or any(
        len(line) > _LONG for line in remedy.code.splitlines()
    )


def _error(remedy: Remedy) -> float:
    """How far it is off what is right; inf where its dtype does not hold that."""
    if remedy.true_loss is not None and remedy.error is None:
        return math.inf
    return (remedy.error or 0.0) if remedy.misses else 0.0


def _measure_elsewhere(failure: Failure, trials: Trials) -> None:
    """Measures how far remedies move loss and gradients where nothing fails.

    That is with the batch of the last clean step, where it is known and finite still;
    else with another sample in place of the one that fails: with the same dropout
    masks, and as many samples. What changes no finite result moves nothing there.
    """
    sample, size = failure.found.sample, failure.found.num_samples
    num_moving = sum(remedy.moves_results != 0 for _, remedy in trials.helped)
    if not num_moving:
        return
    if failure.clean is not None and trials.allow(1 + num_moving):
        clean = OtherCall(failure.clean)
        plain = trials.run_part(StepPart(), [clean]) if trials.may_run() else None
        if plain is not None:
            _measure(trials, plain, StepPart(), [clean], is_of_clean=True)
            return
    if sample is None or size < 2:
        return
    rows = with_stand_in(sample, size)
    others = StepPart(failure.place, rows, has_table=False)
    plain = failure.others
    if (plain is None or not plain.has_backward) and trials.may_run():
        plain = trials.run_part(others, ())
    if plain is not None and plain.has_backward:
        _measure(trials, plain, others, (), stand_in=rows[sample])


def _measure(
    trials: Trials,
    plain: ReplayResult,
    part: StepPart,
    before: Sequence[Patch],
    **facts: Any,
) -> None:
    """Measures remedies on a part of the step that is finite without them."""
    for patches, remedy in trials.helped:
        if not trials.may_run():
            return
        # Such a change is one of this step's samples, and no part is run with it.
        if any(type(patch).calls is not Patch.calls for patch in patches):
            continue
        if remedy.moves_results == 0:
            continue
        changed = trials.run_part(part, [*before, *patches])
        if changed is not None:
            moved = distance(changed.gradients, plain.gradients)
            first, then = loss_of(plain), loss_of(changed)
            both = None if first is None or then is None else (first, then)
            _replace(trials, remedy, moved=moved, losses=both, **facts)


def _find_hidden(failure: Failure, trials: Trials) -> Failure | None:
    """Finds the overflow that is left with the last remedy, if the loss hides one.

    Such as that of a divisor: 1 / inf is 0.
    """
    patches, remedy = trials.helped[-1]
    result = trials.run(patches, traced=failure.place)
    table = result.table
    if table is None:
        return None
    made = table.made_of([*result.losses, *result.gradients.values()])
    for op in table.ops:
        details = op.details if op in made and op.makes_bad else None
        if details is not None and details.is_overflow:
            _replace(trials, remedy, hides=f"{op.text} still overflows")
            root_op = RootOp(op, [op])
            found = explain_root_op(root_op, table.ops, op.in_backward)
            return Failure.of(found, root_op, table, failure.place)
    return None


def _replace(trials: Trials, remedy: Remedy, **changes: Any) -> None:
    """Changes facts of a remedy that was tried."""
    for i, each in enumerate(trials.remedies):
        if _key(each) == _key(remedy):
            trials.remedies[i] = replace(each, **changes)


def _key(remedy: Remedy) -> tuple[str, str, int]:
    return remedy.text, remedy.code, remedy.line


def _try_all(failure: Failure, trials: Trials) -> None:
    for attempts in _attempts(failure, trials):
        try:
            trial = next(attempts, None)
            while trial is not None and not trials.is_over:
                trial = attempts.send(_attempt(trial, failure, trials))
        except StopIteration:
            pass
        if trials.is_over:
            break


def _attempt(trial: Trial, failure: Failure, trials: Trials) -> bool:
    num_helped = len(trials.helped)
    is_remedy = trials.attempt(trial)
    if is_remedy and trials.applied.trials:
        _try_alone(trial, trials)
    is_finite = len(trials.helped) > num_helped
    # What comes to the loss and the gradients of float64 is right, such as 1 / inf.
    is_true = is_remedy and trials.truth is not None and trials.remedies[-1].is_right
    is_open = failure.found.is_overflow and not is_true
    if is_finite and is_open and trials.may_run():
        hidden = _find_hidden(failure, trials)
        if hidden is not None:
            trials.hiding.append((trial, hidden))
    return is_remedy


def _try_alone(trial: Trial, trials: Trials) -> None:
    """Tries what has helped on top of others without these: they may be in vain."""
    whole, applied, others = trials.remedies[-1], trials.applied, trials.remedies[:-1]
    trials.applied = AppliedPatches()
    is_alone = trials.may_run() and trials.attempt(trial)
    is_alone = is_alone and trials.remedies[-1].is_right
    trials.remedies = [*others, trials.remedies[-1] if is_alone else whole]
    trials.applied = applied


def _go_on(failure: Failure, trials: Trials, most: int) -> None:
    """Tries further remedies besides those that have uncovered another failure."""
    applied, failed, hiding = trials.applied, trials.failed, trials.hiding
    seen = set[Any]()
    left: list[tuple[Trial, Failure | int]] = [*hiding, *failed]
    for trial, after_or_place in left:
        if trials.is_over or not most:
            return
        trials.go_on(applied.with_trial(trial))
        if isinstance(after_or_place, Failure):
            after: Failure | None = after_or_place
        else:
            after = remaining_failure(failure, trials, after_or_place)
        if after is None or after.mark in seen:
            continue
        seen.add(after.mark)
        _try_all(after, trials)
        if not trials.found_remedy:
            _go_on(after, trials, most - 1)


def _attempts(failure: Failure, trials: Trials) -> Iterator[Attempts]:
    """The patches to try, those that change the least first."""
    cause = Cause.of(failure.found.cause)
    if failure.is_meant:
        yield empty_row_trials(failure, trials)
        return
    if failure.op is None and trials.replayer.ranks.is_alone:
        yield _zero_unwritten(failure, trials)
    if "samples" in cause.remedies:
        yield select_trials(failure, trials)
        if not trials.found_remedy:
            yield _drop_bad_samples(failure, trials)
    if failure.sentinel is not None:
        yield _replace_sentinel(failure.sentinel, failure, trials)
    if "checkpoints" in cause.remedies and failure.checkpoints:
        from .checkpoints import try_checkpoints  # the user gives some, seldom

        yield try_checkpoints(failure.checkpoints, trials)
    if "calls" in cause.remedies:
        yield exact_trials(failure, trials, EXACT)
        yield select_trials(failure, trials)
    if cause.is_overflow:
        yield float32_trials(failure, trials, in_words=False)
        yield exact_trials(failure, trials, IN_LOGARITHMS)
        yield float64_trials(failure, trials)
        yield guard_trials(failure, trials)
        yield divisor_trials(failure, trials)
        yield try_wider_dtypes(failure, trials)
        yield float32_trials(failure, trials, in_words=True)
        yield _try_smaller_weights(failure, trials)
    elif "calls" in cause.remedies:
        yield cancelled_trials(failure, trials)
        yield exact_trials(failure, trials, IN_LOGARITHMS)
        yield float64_trials(failure, trials)
        yield mask_trials(failure, trials)
        yield rounded_trials(failure, trials)
        yield value_trials(failure, trials)
        yield link_trials(failure, trials)
        yield guard_trials(failure, trials)
        yield lost_trials(failure, trials)
        yield float32_trials(failure, trials, in_words=False)
    if "weights" in cause.remedies:
        yield _repair_weights(failure, trials)
    if cause.is_overflow and failure.found.phase == "backward":
        yield _try_loss_scales(failure, trials)


def _zero_unwritten(failure: Failure, trials: Trials) -> Attempts:
    """The forward with 0 for what a cache holds where nobody has written to it.

    Whether that was there before is not known of what the forward writes to; if it is
    finite with zeros, it was.
    """
    found, call = failure.found, trials.calls[failure.place]
    if call.has_backward:
        return
    name, cache = found.tensor, dict(call.leaves()).get(found.tensor)
    code, models = f"{name}.zero_()", trials.replayer.models
    if cache is None:
        owner, _, key = name.rpartition(".")
        is_one = len(models) == 1
        code = f'model.get_submodule("{owner}").{key}.zero_()' if is_one else ""
    elif not call.was_written(cache):
        return
    if cache is None and not kept_at(models, name)[0]:
        return
    remedy = Remedy(f"zero `{name}` when it is allocated", code)
    if (yield Trial(remedy, WithoutBad(failure.place, name, cache is None))):
        found.cause = BAD_WEIGHTS.name if cache is None else BAD_DATA.name
        found.notes = [
            each for each in found.notes if each != CARRIED.format(f"`{name}`")
        ]
        found.evidence.append("with 0 in the place of these values it is finite")


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


def _replace_sentinel(sentinel: Sentinel, failure: Failure, trials: Trials) -> Attempts:
    """The step with 0 in place of a number that looks like a placeholder."""
    if not sentinel.can_be_replaced or not trials.replayer.ranks.is_alone:
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
            f"use a loss scale of {scale:g} instead of {max(scales):g}",
            f"torch.amp.GradScaler(init_scale={scale:g})",
        )
        yield Trial(remedy, ScaledGradients(scale / max(scales)))
