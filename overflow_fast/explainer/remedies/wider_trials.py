"""Calls in a wider dtype, from the one that failed to where a result fits again.

1. A change (`InWider`) names the first calls: the one that lost a value, if known; else
   the one that failed, or those that made what it was given, a few calls back.
2. A run with all that follows in the wider dtype shows how large each result is.
3. The first results behind the failure that fit again are cast back. That is the trial,
   with the edits of `wider_text.py`. What has no text is no trial: `keep_in_fp32` has
   modules in float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from ...base.torch_ops import has, is_sum, op_of
from ...guard.report.remedy import Remedy
from ..torch_calls import Key, TorchCall, Value, calls_before
from .call_patch import CallPatch, InWider
from .edited_lines import remedy_of
from .failure import Failure
from .source import NOT_WRITTEN
from .trials import Attempts, Trial, Trials
from .wider_text import has_text, wider_edits, wider_text

_MOST_ROOTS = 3  # calls that are in a wider dtype each on its own
_MOST_BACK = 4  # calls before the failing one whose result is the first in it
_DEPTHS = (0, 1, _MOST_BACK)  # of these, as each takes two replays
_OTHER_SIDE = (
    "float64 was not tried for a difference of two numbers that round to 1: a little "
    "farther out it rounds it away, too. It stays where both are small, as by "
    "erfc in place of 1 + erf, or sigmoid(-x) in place of sigmoid(x)."
)
# Of what fits a dtype, by its largest magnitude; of float32 squares do, too.
_SIZES = {torch.float16: (1e-2, 3e4)} | dict.fromkeys(
    (torch.bfloat16, torch.float32), (1e-15, 1e15)
)


def wider_trials(failure: Failure, trials: Trials) -> Attempts:
    """The call that failed in a wider dtype, or what made its inputs, up to that call.

    A run with all that follows in it tells where results fit again. Of float32 it is
    tried where no exact form was found, and the step in float64 is finite.
    """
    narrow = failure.half or torch.float32
    if narrow is torch.float32 and not _may_be_float64(failure, trials):
        return
    failing = {call.key for call in failure.failing_calls}
    for place, roots in enumerate(_roots(failure)):
        is_last = place > 0 or narrow is torch.float32
        if trials.found_right and is_last:
            return
        keys = {call.key for call in roots}
        for each in trials.applied.wider:  # which this one stands for as well
            keys |= each.roots
        trial = _wider_trial(keys, failing, narrow, failure, trials)
        if trial is not None and (yield trial):
            return


def _roots(failure: Failure) -> Iterator[Sequence[TorchCall]]:
    """Yields calls that may be the first ones: the one that lost a value, if known.

    What is computed from a later one on has lost it. Else, those that failed and those
    that made what these were given, one and more calls back.
    """
    roots = failure.failing_calls
    lost = None if failure.lost is None else failure.lost.torch_call
    if lost is not None:
        yield [lost]
    for depth in range(_MOST_BACK + 1):
        if roots and depth in (_DEPTHS if lost is None else _DEPTHS[-1:]):
            yield roots
        made = [value.call for call in roots for value in call.inputs]
        roots = list(dict.fromkeys(filter(None, made))) or (roots if depth else [])


def _may_be_float64(failure: Failure, trials: Trials) -> bool:
    roots = failure.failing_calls
    if failure.growth is not None:
        return False  # with each call: beyond float64's maximum, too, some calls later
    lost, made = failure.found.lost_by, failure.lost
    is_difference = lost is not None and bool(lost.operands)
    if is_difference and made is not None and 1.0 in op_of(made.base).never:
        failure.found.notes.append(_OTHER_SIDE)
        return False
    is_of_mps = any(e.device.type == "mps" for call in roots for e in call.inputs)
    is_cast = any(call.name == "to" for call in roots)
    is_held = trials.truth is not None and trials.truth.fits(torch.float32)
    return is_held and not (is_of_mps or is_cast)


def _wider_trial(
    keys: set[Key],
    failing: set[Key],
    narrow: torch.dtype,
    failure: Failure,
    trials: Trials,
) -> Trial | None:
    calls = trials.torch_calls
    change = InWider(frozenset(keys), narrow=narrow)

    def is_narrow(call: TorchCall) -> bool:
        values = (*call.inputs, *call.results)
        return any(value.dtype == narrow for value in values)

    roots = [call for call in calls if call.key in keys and is_narrow(call)]
    if not roots or not trials.may_run() or not has_text(change, roots, calls):
        return None

    def was_wide(call: TorchCall) -> bool:
        return all(value.dtype != narrow for value in call.results)

    keys = {call.key for call in roots}
    stops = frozenset(_keys_of(calls, was_wide))
    change = replace(change, roots=frozenset(keys), stops=stops)
    patch = CallPatch((change,))
    applied = trials.applied.with_trial(Trial(Remedy(""), patch))
    has_backward = failure.found.phase != "forward"  # else most is of derivatives
    table = trials.run(applied.patches, failure.place, has_backward=has_backward).table
    if table is None:
        return None
    sizes: dict[TorchCall, float] = {}
    for op in table.ops:  # the last one that is no view made what a call returned
        if op.torch_call is not None and op.abs_max is not None:
            sizes[op.torch_call] = torch.inf if op.kinds else op.abs_max
    own = [op for op in table.ops if op.custom or not op.in_backward]
    bad = [op.torch_call for op in own if op.makes_bad]
    # Such as another sum, or a divisor's: 1 / inf is finite.
    more = {call.key for call in bad if call is not None} - keys
    full = _nearly_full_sums(narrow, failing, sizes)
    more |= {call.key for call in full if not was_wide(call)} - keys
    # What is undefined elsewhere needs no wider dtype.
    if more and failure.found.is_overflow and len(keys) < _MOST_ROOTS:
        found = _wider_trial(keys | more, failing, narrow, failure, trials)
        if found is not None:
            return found
    if failing <= {call.key for call, size in sizes.items() if size == torch.inf}:
        return None  # such as what autocast casts again
    stops |= _keys_of(table.torch_calls, lambda call: not was_wide(call))
    change = replace(change, stops=stops)  # and what autocast casts
    divides = [e for e in table.torch_calls if e.key in applied.calls.needs_wide]
    divisors = filter(None, (call.operands[1].call for call in divides))
    needed = {each.key for call in divisors for each in (call, *calls_before(call))}
    ends = _ends_of(change, failing, table.torch_calls, sizes, needed)
    change = replace(change, ends=frozenset(call.key for call in ends))
    with contextlib.suppress(*NOT_WRITTEN):
        edits = wider_edits(change, calls)
        remedy = remedy_of(wider_text(change, calls), edits)
        return Trial(remedy, CallPatch((change,)), edits)
    return None


def _keys_of(
    calls: Sequence[TorchCall], condition: Callable[[TorchCall], bool]
) -> set[Key]:
    """The keys for whose calls a condition holds, all of them."""
    false = {call.key for call in calls if not condition(call)}
    return {call.key for call in calls} - false


def _nearly_full_sums(
    narrow: torch.dtype, failing: set[Key], sizes: dict[TorchCall, float]
) -> list[TorchCall]:
    """The sums of the function that failed which a longer batch overflows."""
    functions = [key[1][0][:3] for key in failing if key[1]]
    largest, most = _SIZES[narrow][1], torch.finfo(narrow).max
    full = [call for call, size in sizes.items() if largest <= size < most]
    own = [e for e in full if e.sites and e.sites[0].key[:3] in functions]
    return [e for e in own if is_sum(e.name)]


def _ends_of(
    change: InWider,
    failing: set[Key],
    calls: Sequence[TorchCall],
    sizes: dict[TorchCall, float],
    needed: set[Key],
) -> list[TorchCall]:
    """The calls whose results fit again, where a run has cast none back.

    None of which the one that failed is made: what it is given would be rounded again.
    Nor one of which something is made that does not.
    """
    smallest, largest = _SIZES[change.narrow]

    def fits(call: TorchCall) -> bool:
        size = sizes.get(call, torch.inf)
        is_fitting = size == 0 or smallest < size < largest
        is_fitting &= call.key not in needed
        return is_fitting and not has(call.name, "moves")

    fitting = _keys_of(calls, fits) & _behind(failing, calls)
    wide: set[Value] = set()
    ends: dict[Key, TorchCall] = {}
    has_run = False
    for call in calls:
        has_run |= call.key in failing
        is_wide = call.key in change.roots or not wide.isdisjoint(call.inputs)
        if not is_wide or call.key in change.stops:
            continue
        if has_run and call.key in fitting and not call.is_in_place:
            ends.setdefault(call.key, call)
        else:
            wide.update(call.results)
    return list(ends.values())


def _behind(failing: set[Key], calls: Sequence[TorchCall]) -> set[Key]:
    """The keys of the calls that are behind one that failed, or lead to none.

    That goes by values: in another run of a function a call before it comes later.
    """
    leading, made = set[Value](), set[Value]()
    for call in reversed(calls):
        if call.key in failing or not leading.isdisjoint(call.results):
            leading.update(call.inputs)
    for call in calls:
        if call.key in failing or not made.isdisjoint(call.inputs):
            made.update(call.results)
    leading -= made
    return _keys_of(calls, lambda call: leading.isdisjoint(call.results))
