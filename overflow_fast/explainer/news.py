"""The news of a bad step, beside the steps before it: one line, or nothing.

Clean steps scan nothing for it. What is compared is there anyway:

1. Of the batch: that of the last clean step, which is held for remedies, and 64 values
   of each tensor in the last 8 clean steps (`CallKeeper.recent`).
   Of all clean steps the largest shapes are known (`CallKeeper.longest`).
   On devices samples are not taken: there the last clean batch is all that is known.
2. Of weights, the loss and gradients: the largest magnitudes of the last steps
   (`PastSteps`). Of small weights as they were when the guard began (`LastSteps`).

The first question counts that has an answer. What is common in healthy steps, as a 0 or
a nan label, is told only where the operation that failed was given such a number; a
wrong threshold makes the line one that is true and beside the point.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ..base.tensors import is_readable, sizes_of
from ..base.text import counted
from ..guard.kept_calls.call_keeper import MOST_SIZED
from ..guard.kept_calls.kept_call import NUM_SAMPLED
from ..guard.report.causes import (
    BAD_DATA,
    DIVERGENCE,
    EMPTY_REDUCTION,
    SINGULAR_GRADIENT,
    UNDEFINED,
)
from ..guard.report.explanation import Explanation
from ..guard.report.gist import plain_number
from .bad_step import BadStep
from .bounds import LONGER, TREND, WEIGHT_AT_ONCE, WHOLE_BATCH
from .calls import Call
from .weight_growth import beside_first, drift_of

_OF_NUMBERS = (UNDEFINED.name, SINGULAR_GRADIENT.name)  # such as of a 0
_FEW = 4  # steps of a trend
_ALIKE = 1.02  # times the last step's numbers, which are told as one; chosen


def news_of(step: BadStep, found: Explanation) -> str:
    """Writes what is new in a step, or "". Incurs a sync for tensors on a device.

    Args:
        step: The step.
        found: Its explanation.
    """
    is_open = found.cause != DIVERGENCE.name  # which is what they would tell
    texts = (
        text
        for texts in (
            _of_batch(step, found),
            _of_slice(step, found),
            _of_own_input(step),
            _of_sizes(step) if found.is_overflow else (),
            filter(None, [drift_of(step, step.reached if is_open else ())]),
            _of_named(step, found),
            *((_of_weights(step), _of_trend(step)) if is_open else ()),
            _of_labels(step, found),
            _of_mask(step),
        )
        for text in texts
    )
    return next(texts, "")


def _bad_call(step: BadStep) -> Call | None:
    calls, place = step.calls, step.forward
    place = place if 0 <= place < len(calls) else len(calls) - 1
    return calls[place] if calls and not calls[place].is_overwritten() else None


_Pairs = list[tuple[str, torch.Tensor, torch.Tensor, list[float]]]


def _beside_clean(step: BadStep) -> _Pairs:
    """The batch's tensors, each with its name, the last clean one, and samples."""
    call, clean = _bad_call(step), step.kept.clean
    if call is None or clean is None or clean.is_overwritten():
        return []
    given, before = call.tensors, clean.tensors
    names = {id(tensor): name for name, tensor in call.leaves()}
    if len(given) != len(before):
        return []
    return [
        (names[id(new)], now, was, _sampled(step, i, now))
        for i, (new, old) in enumerate(zip(given, before, strict=True))
        if new is not old and new.dtype == old.dtype and id(new) in names
        if not isinstance(new, nn.Parameter)
        if is_readable(now := new.detach()) and is_readable(was := old.detach())
    ]


def _was_given_zero(found: Explanation) -> bool:
    numbers = () if found.op is None else found.op.operands
    return 0.0 in numbers or found.cause in _OF_NUMBERS


def _was_given_nothing(found: Explanation) -> bool:
    return _was_given_zero(found) or found.cause == EMPTY_REDUCTION.name


def _of_batch(step: BadStep, found: Explanation) -> Iterator[str]:
    """The batch beside the last clean one, and samples of those before."""
    every, has_zero = _beside_clean(step), _was_given_zero(found)
    pairs = [each for each in every if _is_data(each[1])]
    for name, now, was, sampled in pairs:
        most, last = _largest(now), _largest(was)
        if WHOLE_BATCH.is_passed(most, max([last, *sampled])):
            usual, before = _of_samples(sampled[:-1], last)
            yield (
                f"`{name}` is up to {plain_number(most)} in this batch, at most "
                f"{plain_number(usual)} in the last one{before}"
            )
    is_asked = _was_given_nothing(found)
    if is_asked:
        yield from _of_nothing(every)
    for name, now, was, _ in every if has_zero and found.sample is not None else ():
        if found.sample in _with_equal_rows(now) and not _with_equal_rows(was):
            yield (
                f"sample {found.sample} of `{name}` is one row {now.shape[1]} times; "
                "no sample was in the last clean step"
            )
    for name, now, was, _ in pairs:
        bad, num_zeros = int((~now.isfinite()).sum()), int((now == 0).sum())
        if bad and found.cause == BAD_DATA.name and was.isfinite().all():
            yield (
                f"{bad} of {now.numel()} values of `{name}` are not finite; none was "
                "in the last clean step"
            )
        if num_zeros and has_zero and bool((was != 0).all()):
            is_one = now.numel() == 1
            was_not = f"`{name}` is 0, and was not in the last clean step"
            yield was_not if is_one else _some_text(name, now, num_zeros, "zero")
        if has_zero and found.sample is not None:
            yield from _of_constants(name, now, was, found.sample)
        is_single = is_asked and now.dim() and was.dim()
        if is_single and len(now) <= 1 < len(was):
            yield (
                f"`{name}` is {list(now.shape)} in this batch, {list(was.shape)} in "
                "the last one"
            )


def _some_text(name: str, now: torch.Tensor, num: int, what: str) -> str:
    among = f"among {now.numel()} values"
    return f"`{name}` has {counted(num, what)} {among}, none in the last clean step"


def _of_sizes(step: BadStep) -> Iterator[str]:
    """A tensor of the batch that is longer than any of clean steps, such as texts."""
    call = _bad_call(step)
    given = [] if call is None else call.tensors
    own = [sizes_of(each) for each in given[:MOST_SIZED]]
    longest = step.kept.longest.get(tuple(map(len, own)), ())
    names = {} if call is None else {id(each): name for name, each in call.leaves()}
    for now, shape, most in zip(given, own, longest, strict=False):
        sizes = [*enumerate(zip(shape, most, strict=True))][1:]  # in one sample
        for dim, (size, before) in sizes if id(now) in names else ():
            if LONGER.is_passed(size, before):
                yield (
                    f"`{names[id(now)]}` is {list(now.shape)} in this batch; its "
                    f"dimension {dim} was at most {before} in clean steps"
                )


def _of_labels(step: BadStep, found: Explanation) -> Iterator[str]:
    """A tensor of the batch that has one value throughout, such as labels."""
    for name, now, was, _ in _beside_clean(step) if _was_given_nothing(found) else ():
        if found.sample is not None and not now.is_floating_point():
            yield from _of_constants(name, now, was, found.sample)
        if _is_constant(now) and not _is_constant(was):
            value = f"{now.flatten()[0].item():.7g}"
            yield f"`{name}` is {value} throughout; it was not in the last clean step"


def _of_mask(step: BadStep) -> Iterator[str]:
    """A mask that selected all or nothing in the last clean step, and some now."""
    for name, now, was, _ in _beside_clean(step):
        is_mask = not now.is_floating_point() and now.numel() and was.numel()
        if is_mask and bool(((now == 0) | (now == 1)).all()):
            usual = was.flatten()[0]
            num = int((now != usual).sum())
            if bool((was == usual).all()) and 0 < num < now.numel():
                yield _some_text(name, now, num, "zero" if usual else "one")


def _of_nothing(pairs: _Pairs) -> Iterator[str]:
    """A part of the batch, such as a list of tensors, that has no values at all."""
    sizes = dict[str, tuple[int, int]]()
    for name, now, was, _ in pairs:
        ends = [*(each.start() for each in re.finditer(r"[.\[]", name)), len(name)]
        for part in (name[:end] for end in ends):
            num, before = sizes.get(part, (0, 0))
            sizes[part] = num + now.numel(), before + was.numel()
    for part, (num, before) in sizes.items():
        if before and not num:
            had = f"had {counted(before, 'value')} in the last clean step"
            yield f"`{part}` is empty in this batch, and {had}"


def _is_constant(values: torch.Tensor) -> bool:
    return values.numel() > 1 and bool((values == values.flatten()[0]).all())


def _of_constants(
    name: str, now: torch.Tensor, was: torch.Tensor, sample: int
) -> Iterator[str]:
    """The sample that fails, if it has one value throughout, which is not usual."""
    known = _constants(now, 0)
    if sample in known and not _constants(was, 0):
        yield (
            f"sample {sample} of `{name}` is {plain_number(known[sample])} throughout; "
            "no sample was of one value in the last clean step"
        )


def _with_equal_rows(values: torch.Tensor) -> set[int]:
    """The samples of several rows that are equal, such as a group of candidates."""
    if values.dim() < 3 or values.shape[1] < 2:
        return set()
    are_equal = (values == values[:, :1]).flatten(1).all(1)
    return {*are_equal.nonzero().flatten().tolist()} - _constants(values, 0).keys()


def _of_slice(step: BadStep, found: Explanation) -> Iterator[str]:
    """A slice of the batch that has one value, at the index where the operation failed.

    So it is with a channel that is constant, of which a 0 is the deviation.
    """
    op, call = found.op, _bad_call(step)
    if op is None or call is None or not _was_given_zero(found):
        return
    shape, index = (op.outputs[0].shape, op.first_index) if op.outputs else ((), ())
    failed = [each for each in zip(shape, index or (), strict=False) if each[0] > 1]
    for name, tensor in call.leaves():
        for dim, size in enumerate(tensor.shape if _is_data(tensor) else ()):
            known = _constants(tensor.detach(), dim)
            for _, place in (e for e in failed if e[0] == size and e[1] in known):
                if len(known) == 1:  # else it may be usual there
                    value = plain_number(known[place])
                    at = f"[{':, ' * dim}{place}]" if dim else f"[{place}, :]"
                    yield f"`{name}{at}` is {value} throughout, alone of {size}"


def _constants(values: torch.Tensor, dim: int) -> dict[int, float]:
    """The parts along a dimension that have one value throughout, with this value."""
    if values.dim() < 2:
        return {}
    parts = values.movedim(dim, 0).flatten(1)
    if parts.shape[1] < 2:
        return {}
    places = (parts.amax(1) == parts.amin(1)).nonzero().flatten().tolist()
    return {place: float(parts[place, 0]) for place in places}


def _of_own_input(step: BadStep) -> Iterator[str]:
    """The model's own input within a function, of which only samples are known."""
    call = _bad_call(step)
    if call is None or not call.forwards:
        return
    inner = call.forwards[-1]
    names = {id(tensor): name for name, tensor in inner.leaves()}
    for place, tensor in enumerate(inner.tensors):
        sampled = _sampled(step, place, tensor, is_inner=True)
        own = inner.samples[place]
        is_known = _is_data(tensor) and sampled and own and id(tensor) in names
        if not is_known or inner.is_overwritten():
            continue
        if WHOLE_BATCH.is_passed(_largest(_values(own, tensor)), max(sampled)):
            now = plain_number(_largest(tensor.detach()))
            yield (
                f"the model's `{names[id(tensor)]}` is up to {now} in this batch"
                f"{_of_samples(sampled)[1]}"
            )


def _of_samples(sampled: Sequence[float], last: float = 0.0) -> tuple[float, str]:
    """The largest magnitude of the last step, and a clause on those before.

    One number is of all steps where those before have come to nearly the same.

    Args:
        sampled: The largest of the values kept of each step before the last one.
        last: That of all values of the last one, if they are known.
    """
    if not sampled:
        return last, ""
    steps = "the one" if len(sampled) == 1 else f"each of the {len(sampled)}"
    looked, most = f"{NUM_SAMPLED} values of {steps} before it", max(sampled)
    if most <= _ALIKE * last:
        return max(most, last), f", and in {looked}"
    return last, f" ({looked}: at most {plain_number(most)})"


def _sampled(
    step: BadStep, place: int, tensor: torch.Tensor, is_inner: bool = False
) -> list[float]:
    """The largest magnitude of the values kept of each last step, the oldest first."""
    if not tensor.is_floating_point():
        return []
    kept = [each[is_inner] for each in step.kept.recent]
    found = [each[place] for each in kept if len(each) > place]
    return [_largest(_values(each, tensor)) for each in found if each]


def _values(sample: bytes, tensor: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(sample), dtype=tensor.dtype)


def _is_data(tensor: torch.Tensor) -> bool:
    is_float = tensor.is_floating_point() and bool(tensor.numel())
    return is_float and not isinstance(tensor, nn.Parameter)


def _largest(values: torch.Tensor) -> float:
    values = values[values.isfinite()]
    return float(values.abs().max()) if values.numel() else 0.0


def _of_weights(step: BadStep) -> Iterator[str]:
    """A weight that is far larger at once, or 0: what made it so is not known."""
    for name, recent in step.past.weights.items():
        *before, now = recent or [0.0]
        most = max(before, default=0.0)
        if before and WEIGHT_AT_ONCE.is_passed(now, most):
            yield (
                f"the weight `{name}` is up to {plain_number(now)}, at most "
                f"{plain_number(most)} in {_steps_before(len(before))}"
            )
        elif before and now == 0 < min(before):
            yield (
                f"the weight `{name}` is 0 throughout, up to "
                f"{plain_number(before[-1])} in the step before"
            )


def _steps_before(number: int) -> str:
    return "the step before" if number == 1 else f"the {number} steps before"


def _of_named(step: BadStep, found: Explanation) -> Iterator[str]:
    """A small weight or buffer that the reason names, which was above 0 at first."""
    told = " ".join([found.reason, *found.evidence])
    for _, name, weight, first in beside_first(step):
        owner, _, own = name.rpartition(".")
        is_own = owner == found.module and f"{own} is " in told
        if not (is_own or f"`{name}[" in told) or weight.numel() < 2:
            continue
        if not bool((first > 0).all()):
            continue
        below, zeros = (int(f(weight, 0).sum()) for f in (torch.lt, torch.eq))
        num = below or zeros
        if num:
            what = f"{num} of {weight.numel()} values of `{name}`"
            are = f"{'is' if num == 1 else 'are'} {'below ' * (below > 0)}0"
            yield f"{what} {are}, none when the guard began"


def _of_trend(step: BadStep) -> Iterator[str]:
    """A loss, or gradients, that grow from step to step."""
    past = step.past
    for name, values in (
        ("the loss", past.finite_losses),
        ("the gradients", past.gradients),
    ):
        last = values[-_FEW:]
        pairs = list(itertools.pairwise(last))
        if len(last) == _FEW and all(TREND.is_passed(b, a) for a, b in pairs):
            went = ", ".join(map(plain_number, last))
            yield f"{name} went {went} in the steps before"
