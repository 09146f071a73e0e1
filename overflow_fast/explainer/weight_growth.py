"""Weights that are far larger than in the steps before, or others than at first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base.tensors import is_readable
from ..guard.report.gist import told_number
from .bad_step import BadStep
from .bounds import GROWN, ROUNDED_UPDATE, SCALED_BACK, UPDATE, VANISHED, WEIGHT
from .named_tensors import names_of
from .optimizer_step import group_of
from .tensor_kinds import sizes_and_bad

_NO_BOUND = (
    "in the steps before its magnitude changed by at most {:.3g} times the learning "
    "rate; betas ({:g}, {:g}): where beta1**2 is above beta2, that has no bound in Adam"
)
_BETA = (
    "load an older checkpoint, and set beta2 above beta1**2, such as the usual 0.999"
)
_OTHERS = (
    "{}'s exp_avg_sq, such as that of a checkpoint, does not fit its exp_avg, or other "
    "code has written the weight"
)
_STATE = (
    "load an older checkpoint, its optimizer's state in float32 (in half precision "
    "exp_avg_sq may be 0) or not at all; look for code that writes to weights"
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
        evidence: What there is to say of an optimizer's settings.
        advice: What to try; "" for what is usual.
        factors: By how much they have to be multiplied to be as large as they were.
    """

    text: str
    evidence: list[str]
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
    return WeightGrowth(text, evidence, factors, advice)


def beside_first(
    step: BadStep,
) -> Iterator[tuple[str, str, torch.Tensor, torch.Tensor]]:
    """Yields small weights and buffers: kind, name, values now, those of the beginning.

    Of the same shape, and where they can be read: FSDP takes the memory of weights.
    """
    for kind, name, weight in names_of(step.models):
        first = step.last_steps.first.get(name)
        if first is not None and first.shape == weight.shape and is_readable(weight):
            yield kind, name, weight.detach(), first


def drift_of(step: BadStep, reached: Collection[str]) -> str:
    """Names a small weight that is another one since the guard began, or returns "".

    It is a number that has come to or through 0, or is far larger or smaller.

    Args:
        step: The step.
        reached: The names of those of which their size is told.
    """
    for kind, name, weight, first in beside_first(step):
        if kind == "buffer" or name.endswith("bias"):
            continue
        now, was = (_largest(each.float()) for each in (weight, first))
        is_lost = weight.numel() == 1 and weight.dim() < 2
        is_lost &= now < 0 < was or now == 0 != was
        sizes = abs(now), abs(was)
        has_moved = GROWN.is_passed(*sizes) or VANISHED.is_passed(*sizes[::-1])
        if is_lost or (has_moved and name in reached):
            up_to = "up to " * (weight.numel() > 1)
            numbers = (f"{up_to}{told_number(each)}" for each in (now, was))
            return "`{}` is {}; it was {} when the guard began".format(name, *numbers)
    return ""


def _largest(values: torch.Tensor) -> float:
    """The one value, or the largest magnitude of several."""
    return float(values if values.numel() == 1 else values.abs().max())


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
    updates = [(b - a) / rate for a, b in itertools.pairwise(sizes)] if rate else []
    if len(betas) != 2 or step.past.between != 1 or not updates:
        return f", at a learning rate of {rate:.3g}", [], ""
    most = _most_of_adam(*betas)
    is_open = most == math.inf and not flags.get("amsgrad")  # its divisor never falls
    if is_open and len(updates) > 1 and UPDATE.is_passed(updates[-1], 1.0):
        last_one = f", in the last one by {updates[-1]:.3g} times the learning rate"
        evidence = _NO_BOUND.format(max(updates[:-1]), *betas)
        return f"{last_one} {rate:.3g}", [evidence], _BETA
    if name in ("Adam", "AdamW") and ROUNDED_UPDATE.is_passed(max(updates), most):
        text = f", in one by {max(updates):.3g} times the learning rate {rate:.3g}"
        text += f", where {name} with its own averages makes at most {most:.3g}"
        return text, [_OTHERS.format(name)], _STATE
    return f", at a learning rate of {rate:.3g}", [], ""


def _most_of_adam(beta1: float, beta2: float) -> float:
    """The largest update of Adam in learning rates, whatever the gradients are.

    By Cauchy and Schwarz, for averages of the same gradients since they were 0; the
    second one is that of a first step with both corrections.
    """
    share = beta1**2 / beta2 if beta2 else math.inf
    if share >= 1.0 or beta2 >= 1.0:
        return math.inf
    late = (1 - beta1) / math.sqrt((1 - beta2) * (1 - share))
    return max(late, 1 / math.sqrt(1 - share))
