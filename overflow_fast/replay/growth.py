"""The growth of weights out of all bounds: the run diverges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from ..core.ops import scan
from .incident import Incident
from .places import names_of

_MANY = 10.0  # so many times as large as in one of the last steps
_MORE = 2.0


@dataclass(frozen=True)
class Growth:
    """Weights that have grown in the last steps.

    Attributes:
        text: How much, in words.
        factors: By how much they have to be multiplied to be as large as they were.
    """

    text: str
    factors: dict[str, float]


def growth_of(
    models: Mapping[str, nn.Module], incident: Incident | None
) -> Growth | None:
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
    return Growth(text, factors)


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
