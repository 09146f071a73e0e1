"""Weights and outputs of modules that are far larger than in the steps before."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ..scanner.ops import scan
from ..scanner.text import rounded
from .bad_step import BadStep
from .named_tensors import names_of

_MANY = 10.0  # so many times as large as in one of the last steps
# Outputs vary more than weights; a change of unit is by 60, 100 or 255.
_MANY_OUTPUTS, _LEAST_STEPS = 30.0, 3
_MORE = 2.0  # less is left as it is; chosen, not measured


@dataclass(frozen=True)
class WeightGrowth:
    """Weights that have grown in the last steps.

    Attributes:
        text: How much, in words.
        factors: By how much they have to be multiplied to be as large as they were.
    """

    text: str
    factors: dict[str, float]


def find_growth(
    models: Mapping[str, nn.Module], incident: BadStep | None
) -> WeightGrowth | None:
    """Describes how weights have grown, if it is out of all bounds; else None.

    Args:
        models: The models.
        incident: Has the largest magnitudes of the weights in the last steps.
    """
    if incident is None:
        return None
    history = incident.weights
    before = {name: recent[0] for name, recent in history.items() if recent}
    now = _magnitudes(models, before)
    if not now:
        return None
    name = max(now, key=lambda each: now[each])
    most = max(before.values())
    if now[name] <= max(1.0, _MANY * most):
        return None
    steps = max(map(len, history.values())) * incident.steps_between
    factors = {
        each: before[each] / now[each]
        for each in now
        if now[each] > _MORE * before[each] > 0
    }
    text = (
        f"the largest weight went from {most:.3g} to {now[name]:.3g} ({name}) "
        f"within the last {steps} steps"
    )
    if incident.steps_between == 1:
        text += _jump_text(name, history[name])
    return WeightGrowth(text, factors)


def jump_of_outputs(incident: BadStep | None) -> list[str]:
    """Describes the outputs that are far larger than in each of the steps before.

    Args:
        incident: Has the largest magnitudes of the outputs in the last steps, with this
            one, of those that were finite in all.
    """
    found: list[tuple[float, str]] = []
    for name, recent in {} if incident is None else incident.outputs.items():
        *before, now = recent
        most = max(before, default=0.0)
        if len(before) < _LEAST_STEPS or not 0 < most * _MANY_OUTPUTS < now:
            continue
        times = rounded(now / most, 2)
        text = (
            f"the {name} was last up to {now:.3g} in magnitude, {times} times its "
            f"largest in the {len(before)} steps before"
        )
        found.append((now / most, text))
    return [max(found)[1]] if found else []


def _jump_text(name: str, recent: Sequence[float]) -> str:
    """Names the step that made a weight large, if one alone did; "" otherwise."""
    jumps = [
        (before, after, len(recent) - place)
        for place, (before, after) in enumerate(itertools.pairwise(recent), 1)
        if after > max(1.0, _MANY * before)
    ]
    if len(jumps) != 1:
        return ""
    ((before, after, number),) = jumps
    when = "in the step before" if number == 1 else f"{number} steps before this one"
    return f", {name} from {before:.3g} to {after:.3g} {when}"


def _magnitudes(
    models: Mapping[str, nn.Module], wanted: Mapping[str, float]
) -> dict[str, float]:
    """The largest magnitudes of parameters that are finite."""
    named = {
        name: tensor.detach()
        for kind, name, tensor in names_of(models)
        if kind == "parameter" and name in wanted
    }
    stats = scan(list(named.values()))
    return {
        name: stat.abs_max
        for name, stat in zip(named, stats, strict=True)
        if stat.abs_max is not None and not stat.has_nan and not stat.has_inf
    }
