"""Tries rules on the torch call that failed, and on those before and behind it."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...base.source_files import installed_name, is_of_user
from ...base.torch_ops import has, op_of
from ...guard.report.causes import UNDERFLOW
from ...guard.report.remedy import SAME, Remedy
from ..op_call import OpCall
from ..torch_calls import Key, TorchCall, Value, calls_before
from .call_patch import CallPatch, RuleChange, is_bounded
from .edited_lines import inner_place, remedy_in_words, remedy_of
from .failure import Failure
from .patterns import Found, matched
from .rules import (
    CANCELLED,
    EXACT,
    GUARDS,
    KEPT,
    LINKS,
    LOST,
    MASKS,
    ROUNDED,
    RULES,
    SELECTED,
    SELECTS,
    SMOOTHED,
    UPDATES,
    Rule,
    numbers_of,
    with_numbers,
)
from .sample_trials import border_trials
from .source import NOT_WRITTEN
from .trials import Attempts, Trial, Trials, joined
from .written import rule_edits, short_text

_MOST_BEHIND = 12
_MOST_FAR = 2  # numbers that are tried where the true loss is known
# Of the largest divisor of a call: what others seldom are below; chosen, not measured.
_SMALL_SHARE = 1e-3
_NEAR = 3  # lines: a formula that is written over several; chosen, not measured
INSTALLED = ", installed)"  # ends the words of a remedy of torch's own line
_STAY = "stay with logarithms"


def exact_trials(failure: Failure, trials: Trials) -> Attempts:
    """Forms that are the same in exact arithmetic, and stay in range."""
    for failed in failure.failing_calls:
        for root in (failed, *_behind(failure.calls, failed)):
            if root.key in trials.applied.keys:
                continue
            for rule in EXACT:
                dim = _ratio_dim(failure.calls, root) if "DIM" in rule.new else None
                if "DIM" in rule.new and (dim is None or root is not failed):
                    continue
                for trial, found in trials_of(rule, root, failure.calls, dim):
                    is_near = any(value.call in found.calls for value in failed.inputs)
                    is_near &= "LOG" in rule.new
                    if is_near or failed in (root, *found.calls):
                        yield from _with_twins(trial, rule, root, failure)


def select_trials(failure: Failure, trials: Trials) -> Attempts:
    """Leaves out before it is computed what the forward leaves out afterwards."""
    calls = failure.failing_calls
    # The loss tells nothing of what runs behind backward.
    if not failure.losses or trials.found_remedy or failure.found.is_behind_backward:
        return
    if failure.bad is not None:
        calls = [
            call
            for call in failure.calls
            if any(value.requires_grad for value in call.results)
            and any(value.tensor is failure.bad for value in call.inputs)
        ]
    rules = (*SELECTS, *(KEPT if failure.is_kept else ()))
    for trial in _on(rules, calls, failure, trials):
        if (yield replace(trial, keeps_loss=True)):
            return


def link_trials(failure: Failure, trials: Trials) -> Attempts:
    """A positive function of a layer's result or a weight, where one has to be above 0.

    A clamp of it has no gradient where it acts: what is below 0 would stay there.
    """
    op, failed = failure.found.op, next(iter(failure.failing_calls), None)
    is_below = op is not None and any(number < 0 for number in op.operands)
    if failed is None or not failed.inputs or not is_below:
        return
    way = _raw_way(failed.inputs[0])
    if way is None:
        return
    of_made, *of_calls = LINKS
    made = filter(None, [value.call for value in way or failed.inputs[:1]])
    single = [call for call in made if len(call.results) == 1]
    # Else another call would be given what is below 0 still.
    is_alone = not any(
        {*call.inputs} & {*failed.inputs} for call in failure.calls if call != failed
    )
    for trial in (
        *_on([of_made], single, failure, trials),
        *_on(of_calls, [failed] * is_alone, failure, trials),
    ):
        if trial.edits and not trials.is_settled:
            yield trial


def _raw_way(value: Value, of_weights: bool = True) -> list[Value] | None:
    """The change of a layer's result or a weight, up to a value: what is moved.

    It begins with the first one after it. None where something else is made of it on
    its way than, of a layer's, a product with other numbers.
    """
    call = value.call
    if call is None or not call.inputs:
        return [] if of_weights and isinstance(value.tensor, nn.Parameter) else None
    if _is_layer(call):
        return []
    if has(call.name, "moves"):
        before = _raw_way(next(_moved_from(value)), of_weights)
        return None if before is None else [*before, value]
    if call.plain_name in ("mul", "div"):
        found = [_raw_way(each, of_weights=False) for each in call.inputs]
        return next((each for each in found if each is not None), None)
    return None


def _moved_from(value: Value) -> Iterator[Value]:
    """Yields the values that one was moved from, the nearest first."""
    while (made := value.call) is not None and has(made.name, "moves"):
        is_together = made.name == "broadcast_tensors"
        value = made.inputs[value.place if is_together else 0]
        yield value


def _is_layer(call: TorchCall) -> bool:
    """True for what a module of torch computes with its weight, and a bias."""
    is_module = installed_name(call.sites[0].file).startswith("torch/nn/modules/")
    return is_module and has(call.name, "grows")


def given_trials(failure: Failure, trials: Trials) -> Attempts:
    """A lower bound of a 0 that the program gives an installed package."""
    for failed in filter(inner_place, _met_zero(failure)):
        value = _before_package(failed.inputs[-1])
        if value is not None and value.call is not None:
            for trial in _on(LOST, [value.call], failure, trials):
                if trial.edits:
                    yield trial
        elif value is not None and value.tensor is not None:
            yield from border_trials(value.tensor, failure, trials)


def masked_trials(failure: Failure, trials: Trials) -> Attempts:
    """The mask by which a 0 of the batch was selected, without it."""
    for failed in _met_zero(failure):
        way = [failed.inputs[-1], *_moved_from(failed.inputs[-1])]
        selected = [each.call for each in way if each.call is not None]
        made = [each for call in selected for each in calls_before(call)]
        of_data = [each for each in made if {*each.inputs[:1]} & {*way}]
        masks = [each for each in of_data if each.results[0].dtype is torch.bool]
        leaves = trials.calls[failure.place].leaves()
        if any(each is _data_of(failed) for _, each in leaves):
            yield from _on(SELECTED, masks[:1], failure, trials)


def _met_zero(failure: Failure) -> list[TorchCall]:
    """The call that failed, if the last number that it was given is 0."""
    op = failure.found.op
    is_zero = op is not None and op.operands[-1:] == [0.0]
    return [call for call in failure.failing_calls if is_zero and call.inputs]


def _data_of(call: TorchCall) -> torch.Tensor | None:
    """The tensor of before the step, no weight, that a call's last argument is of.

    That was only moved, as by an index into a buffer.
    """
    *_, first = call.inputs[-1], *_moved_from(call.inputs[-1])
    is_given = first.call is None and not first.requires_grad
    return first.tensor if is_given else None


def _before_package(value: Value) -> Value | None:
    """The value of the program that a package has moved; None if it did more."""
    for each in (value, *_moved_from(value)):
        if each.call is None or not inner_place(each.call):
            return each
    return None


def guard_trials(failure: Failure, trials: Trials) -> Attempts:
    """Guarded forms of the call that failed.

    Of an overflow those of the call that made the large numbers, too.
    """
    op = failure.found.op
    # A number that is added to one below 0 helps by chance.
    is_own = op is not None and bool(op.operands) and not op.derivative
    is_below = is_own and op is not None and op.operands[0] < 0
    helped = set[str]()
    own = failure.failing_calls
    made = failure.leap.torch_call if failure.leap is not None else None
    for failed in (*own, *filter(None, [made])):
        if failed.key in trials.applied.keys:
            continue
        small = _small_number(failed, failure) if failed in own else 0.0
        for rule in GUARDS:
            if trials.is_settled:
                return
            if rule.pattern in helped:
                continue
            if is_below and failed in own and "y + EPS" in rule.new:
                continue
            if failure.beyond_pole and rule.clamps:
                continue
            forms = trials_of(rule, failed, failure.calls, None, small)
            most = None if trials.truth is None else _MOST_FAR
            for trial, _ in itertools.islice(forms, most):
                if (yield from _with_twins(trial, rule, failed, failure)):
                    is_done = trials.remedies[-1].is_right and not _moved(trials)
                    helped |= {rule.pattern} if is_done else set()
                    break


def _moved(trials: Trials) -> bool:
    """True if the last remedy changes results that were finite, as others may not."""
    return (trials.remedies[-1].moves_results or 0.0) > SAME


def _small_number(failed: TorchCall, failure: Failure) -> float:
    """A number that is small beside the others which a call was given, or 0.

    Of data it is the least one above 0, else a share of the largest divisor, where a
    quotient by 0 became inf. What 0 / 0 is to be depends on no such number.
    """
    op = failure.found.op
    if failed.plain_name.startswith("log"):
        data = _data_of(failed)
        above = torch.empty(0) if data is None else data[data > 0]
        return float(above.min()) if len(above) else 0.0
    if op is None or not op.outputs or not op.outputs[0].num_inf:
        return 0.0
    sizes = (each.abs_max or 0.0 for each in op.inputs[-1:])
    return _SMALL_SHARE * max(sizes, default=0.0)


def _with_twins(
    trial: Trial, rule: Rule, root: TorchCall, failure: Failure
) -> Generator[Trial, bool, bool]:
    """A trial together with the same change a line or two away, else alone.

    Returns whether it is a remedy.

    What is given to the one may soon be what fails in the other, such as p in
    log(p) + log(1 - p).
    """
    twins = dict[Key, TorchCall]()
    for call in failure.calls:
        is_near = (
            call.sites[0].code is root.sites[0].code
            and abs(call.sites[0].line - root.sites[0].line) <= _NEAR
        )
        is_other = call.name == root.name and call.key != root.key
        is_alike = call.key in failure.failed or _are_alike(call, root)
        if is_near and is_other and is_alike:
            twins.setdefault(call.key, call)
    found = [trial]
    for call in twins.values():
        for other, _ in itertools.islice(trials_of(rule, call, failure.calls), 1):
            found += [other] * (bool(other.edits) == bool(trial.edits))
    if len(found) > 1 and (yield joined(found)):
        return True
    return (yield trial)


def _are_alike(one: TorchCall, other: TorchCall) -> bool:
    """True if the last numbers that calls were given are of the same, as p and 1 - p.

    A quotient has shown that its divisor is not 0. What the code keeps from 0 is none
    of the kind.
    """
    if not (one.inputs and other.inputs):
        return False
    values = one.inputs[-1], other.inputs[-1]
    if is_bounded(values[0]) > is_bounded(values[1]):
        return False
    return not _sources(values[0]).isdisjoint(_sources(values[1]))


def _sources(value: Value) -> set[Value]:
    """A value, and the numbers that it was made of: a mask that selects is none."""
    made = value.call
    is_quotient = made is None or has(made.name, "divides")
    given = [] if made is None or is_quotient else made.inputs
    return {value, *(each for each in given if each.dtype is not torch.bool)}


def earlier_trials(failure: Failure, trials: Trials) -> Attempts:
    """Other forms of the mask whose infs meet, and of calls up to the failing one."""
    masks = [] if failure.mask is None else [failure.mask.torch_call]
    before = [e for call in failure.failing_calls for e in (call, *calls_before(call))]
    for rules in (CANCELLED, MASKS, ROUNDED):
        yield from _on(rules, [*masks, *before], failure, trials)


def smoothed_trials(failure: Failure, trials: Trials) -> Attempts:
    """No weight in a loss for the classes that a mask has left out."""
    yield from _on(SMOOTHED, failure.failing_calls, failure, trials)


def lost_trials(failure: Failure, trials: Trials) -> Attempts:
    """A bound of what became 0 in its dtype."""
    if failure.lost is not None and failure.found.cause == UNDERFLOW.name:
        yield from _on(LOST, [failure.lost.torch_call], failure, trials)


def _on(
    rules: Sequence[Rule],
    calls: Sequence[TorchCall | None],
    failure: Failure,
    trials: Trials,
) -> Attempts:
    for call in filter(None, dict.fromkeys(calls)):
        for rule in rules if call.key not in trials.applied.keys else ():
            for trial, _ in trials_of(rule, call, failure.calls):
                yield trial


def trials_of(
    rule: Rule,
    root: TorchCall,
    calls: Sequence[TorchCall],
    dim: Any = None,
    small: float = 0.0,
) -> Iterator[tuple[Trial, Found]]:
    """Yields the trials of a rule for a call, each with what it puts there.

    Args:
        rule: The rule.
        root: The call.
        calls: All calls of the replay.
        dim: The dimensions along which a maximum is subtracted.
        small: A number that is small beside others that it is given; 0 for none.
    """
    for number in numbers_of(rule, root, small):
        found = matched(rule, root, root.dtype, number, dim)
        if found is None:
            continue
        yield _trial_of(rule, root, found, calls, number, dim), found


def _trial_of(
    rule: Rule,
    root: TorchCall,
    found: Found,
    calls: Sequence[TorchCall],
    number: float,
    dim: Any = None,
) -> Trial:
    change = _change_of(rule, root, found, number, dim)
    text = with_numbers(found.text or _STAY, found.numbers)
    text = text.replace("CALL", _named(root))
    if dim == ():
        text = text.replace("the maximum", "the maximum of all")
    patch = CallPatch((change,))
    how = rule.is_exact, rule.stops_gradient(root), rule.settles
    try:
        edits = rule_edits(root, calls, change.found)
        return Trial(remedy_of(text, edits), patch, edits, *how)
    except NOT_WRITTEN as error:
        told = _in_words(text, root, str(error))
        others = {e.key: e for e in calls if e.key != root.key and _on_line_of(root, e)}
        for call in others.values() if inner_place(root) else ():
            same = matched(rule, call, root.dtype, number, dim)
            if same is not None:
                more = _change_of(rule, call, same, number, dim)
                patch = CallPatch((*patch.changes, more))
        return Trial(remedy_in_words(told, root), patch, (), *how)


def _change_of(
    rule: Rule, root: TorchCall, found: Found, number: float, dim: Any
) -> RuleChange:
    reads = frozenset(call.key for call in (root, *found.calls))
    return RuleChange(root.key, RULES.index(rule), root.dtype, number, dim, reads)


def _on_line_of(root: TorchCall, call: TorchCall) -> bool:
    """True if a call is of the same line of a package, whoever has called that."""
    return call.name == root.name and call.sites[:1] == root.sites[:1]


def _named(call: TorchCall) -> str:
    return f"`{short_text(call)}`"


def _in_words(text: str, root: TorchCall, why: str) -> str:
    """A remedy for which there is no line: what is computed, in place of what."""
    place = inner_place(root)
    is_torchs = not is_of_user(root.sites[0].file)
    has_key = re.match(r"pass (\w+)=(\S+)", text)
    if has_key and has_key[1] in root.kwargs:
        text = f"change {has_key[1]} to {has_key[2]}"
    whole = text if _named(root) in text else f"{text} in {_named(root)}"
    whole += f" ({place}{INSTALLED}" * is_torchs
    return whole if place else f"{whole}, which is not written out: {why}"


# The calls behind one.


def _behind(calls: Sequence[TorchCall], call: TorchCall) -> list[TorchCall]:
    """The calls that were given its result, and those after them."""
    found: list[TorchCall] = []
    known = set(call.results)
    for each in calls[calls.index(call) + 1 :]:
        if len(found) < _MOST_BEHIND and not known.isdisjoint(each.inputs):
            found.append(each)
            known.update(each.results)
    return found


def _is_linear(call: TorchCall) -> bool:
    return has(call.name, "linear") or has(call.name, "moves")


def _ratio_dim(calls: Sequence[TorchCall], root: TorchCall) -> Any:
    """The dimensions along which a maximum may be subtracted before an exp, or None.

    That is where all that is made of the exp is a quotient of what is linear in it.
    """
    if root.plain_name != "exp" or root.is_in_place:
        return None
    degree: dict[Value, int] = dict.fromkeys(root.results, 1)
    dims: list[Any] = []
    used: set[Value] = set()
    for call in calls[calls.index(root) + 1 :]:
        given = [degree.get(value, 0) for value in call.inputs]
        if not any(given):
            continue
        used.update(call.inputs)
        if call.plain_name == "div":
            above, below = (degree.get(each, 0) for each in call.operands[:2])
            own = above - below
        elif has(call.name, "bilinear"):
            own = sum(given)
        elif _is_linear(call) and (call.name != "add" or min(given) == 1):
            own = max(given)
        else:
            return None
        if own not in (0, 1):
            return None
        if "dim" in op_of(call.name).parameters and call.operands[1] is not None:
            dims.append(call.operands[1])
        degree |= dict.fromkeys(call.results, own)
    if any(own and value not in used for value, own in degree.items()):
        return None
    return dims[0] if len(set(map(str, dims))) == 1 else ()


# Tries guarded forms of a line of an optimizer's own step.


def update_remedies(
    op: OpCall,
    calls: Sequence[TorchCall],
    how_tried: str,
    is_finite_now: Callable[[], bool],
) -> Iterator[Remedy]:
    """Tries other forms of the line of an operation in an optimizer's step.

    Args:
        op: The operation.
        calls: The torch calls of the step.
        how_tried: What is said of the gradients that it is made again with, or "".
        is_finite_now: Makes the step again on a copy; tells whether the weight is
            finite then.
    """
    root = op.torch_call
    if root is None or not is_of_user(root.sites[0].file):
        return
    for rule in (*UPDATES, *GUARDS):
        for trial, _ in trials_of(rule, root, calls):
            patch = trial.patch
            assert isinstance(patch, CallPatch)
            is_finite = False
            with contextlib.suppress(Exception), patch.applied({}):
                is_finite = is_finite_now()
            if patch.is_applied:
                text = f"{trial.remedy.text}{how_tried}"
                yield replace(trial.remedy, text=text, is_finite=is_finite)
