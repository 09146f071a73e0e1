"""Weights and outputs of modules that are far larger than in the steps before."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .bad_step import BadStep
from .bounds import FIRST_TO_GROW, SCALED_BACK, WEIGHT
from .named_tensors import names_of
from .optimizer_twin import group_of
from .past_steps import KEPT
from .tensor_kinds import sizes_and_bad

_SOON = 2  # then it may have grown before the first step that is known
_UPDATES = "the weights, by the update or other code,"
_NO_BOUND = (
    "in the steps before its magnitude changed by at most {:.3g} times the learning "
    "rate; betas ({:g}, {:g}): where beta1**2 is above beta2, that has no bound in Adam"
)
_BETA = (
    "load an older checkpoint, and set beta2 above beta1**2, such as the usual 0.999"
)
_RISEN = (
    "load an older checkpoint, and let the learning rate rise less, or clip gradients"
)
_BELOW = (
    "load an older checkpoint, and keep the learning rate above 0, below which updates "
    "go up the gradient: look at the schedule that sets it"
)


@dataclass(frozen=True)
class WeightGrowth:
    """Weights that have grown in the last steps.

    Attributes:
        text: How much, in words.
        order: Which of loss, gradient and update has grown first, in a sentence; empty
            where it is not known; and what there is to say of an optimizer's settings.
        advice: What to try; "" for what is usual.
        factors: By how much they have to be multiplied to be as large as they were.
    """

    text: str
    order: list[str]
    factors: dict[str, float]
    advice: str = ""


def find_growth(step: BadStep) -> WeightGrowth | None:
    """Describes how weights have grown, if it is out of all bounds; else None."""
    past = step.past
    history = past.weights
    before = {name: recent[0] for name, recent in history.items() if recent}
    named = [(name, each) for _, name, each in names_of(step.models) if name in before]
    now, _ = sizes_and_bad(named)
    if not now:
        return None
    name = max(now, key=lambda each: now[each])
    if not WEIGHT.is_passed(now[name], max(before.values())):
        return None
    num = max(map(len, history.values()))
    steps = f"{num * past.between} steps" if past.between else f"{num} watched steps"
    factors = {
        each: before[each] / now[each]
        for each in now
        if SCALED_BACK.is_passed(now[each], before[each])
    }
    rate, evidence, advice = _settings(step, dict(named)[name], history[name])
    text = (
        f"the largest weight went from {before[name]:.3g} to {now[name]:.3g} ({name}) "
        f"within the last {steps}{rate}"
    )
    return WeightGrowth(text, [*_order(step), *evidence], factors, advice)


def _settings(
    step: BadStep, weight: torch.Tensor, sizes: Sequence[float]
) -> tuple[str, list[str], str]:
    """The learning rates that a weight grew at, evidence of betas, and advice."""
    last, name, flags = list[Mapping[str, Any]](), "", dict[str, Any]()
    for each in step.optimizers:
        place = group_of(each, weight)
        if place is not None:
            last, name = step.last_steps.settings(each, place), type(each).__name__
            flags = each.param_groups[place]
    rates = [each["lr"] for each in last if type(each.get("lr")) is float]
    if not rates or len(rates) < len(last):
        return "", [], ""
    first, rate = rates[0], rates[-1]
    num_below = sum(each < 0 for each in rates)
    if rate < 0 and not flags.get("maximize"):  # which goes up the gradient above 0
        steps = f"{num_below} of the last {len(rates)} steps"
        return f", with a learning rate below 0 in {steps} ({rate:.3g})", [], _BELOW
    if first < rate and rates == sorted(rates):
        what = f"the learning rate rose from {first:.3g} to {rate:.3g}"
        return f", in which {what}", [], _RISEN
    if min(rates) < max(rates):
        return f", at learning rates of {min(rates):.3g} to {max(rates):.3g}", [], ""
    betas: Sequence[float] = last[-1].get("betas", ()) if "Adam" in name else ()
    updates = [abs(b - a) / rate for a, b in itertools.pairwise(sizes)] if rate else []
    is_open = len(betas) == 2 and betas[0] ** 2 > betas[1] and step.past.between == 1
    is_open &= not flags.get("amsgrad")  # whose divisor never falls
    if is_open and len(updates) > 1 and FIRST_TO_GROW.is_passed(updates[-1], 1.0):
        last_one = f", in the last one by {updates[-1]:.3g} times the learning rate"
        evidence = _NO_BOUND.format(max(updates[:-1]), *betas)
        return f"{last_one} {rate:.3g}", [evidence], _BETA
    return f", at a learning rate of {rate:.3g}", [], ""


def _order(step: BadStep) -> list[str]:
    """Which became ten times as large first, and stayed so, within the last steps.

    A step computes its loss, then gradients, then the update, which is seen in the
    weights of the next one. Of several optimizers, one steps between the losses.
    """
    past = step.past
    if len(step.optimizers) != 1:
        return []
    whole = [w for w in past.weights.values() if len(w) == len(past.gradients)]
    largest = [max(each) for each in zip(*whole, strict=True)]
    sizes = {"the loss": past.losses, "gradients": past.gradients, _UPDATES: largest}
    begins, is_known = [], bool(past.gradients)
    for what, values in sizes.items():
        since = _large_since(values)
        if since is not None:
            delay, before = int(values is largest), len(values) - 1 - since
            change = f"from {values[0]:.3g} to {values[since]:.3g}"
            begins.append((before + delay, what, change))
            is_known &= len(values) < KEPT or since > _SOON
    if len(begins) < 2 or not is_known:
        return []
    begins.sort(key=lambda each: -each[0])  # stable: the loss is first in a step
    clauses = [f"{what} {_when(before)} ({change})" for before, what, change in begins]
    return [f"grew tenfold first: {', then '.join(clauses)}"]


def _large_since(values: Sequence[float]) -> int | None:
    """The place since which all values are ten times the first; None if none is."""
    since = None
    for place in reversed(range(1, len(values))):
        if not FIRST_TO_GROW.is_passed(values[place], values[0]):
            break
        since = place
    return since


def _when(before: int) -> str:
    if before == 0:
        return "in this step"
    return "in the step before" if before == 1 else f"{before} steps before this one"
