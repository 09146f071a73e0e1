"""The growth of weights out of all bounds: the run diverges."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..core.ops import scan
from .incident import Incident

_MANY = 10.0  # so many times as large as in one of the last steps
_LARGE = 1e6  # no weight that is of use is larger


def growth_of(models: Mapping[str, nn.Module], incident: Incident | None) -> str:
    """Describes how large the weights have become, if that is a divergence; else "".

    Args:
        models: The models.
        incident: Has the largest magnitudes of the weights in the last steps.
    """
    named = [
        (f"{prefix}{name}", parameter)
        for prefix, model in models.items()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    stats = scan([parameter.detach() for _, parameter in named])
    now = {
        name: stat.abs_max
        for (name, _), stat in zip(named, stats, strict=True)
        if stat.abs_max is not None and not stat.has_nan and not stat.has_inf
    }
    if not now:
        return ""
    name = max(now, key=lambda each: now[each] or 0.0)
    largest = now[name] or 0.0
    history = {} if incident is None else incident.weights
    before = [v for recent in history.values() for v in list(recent)[:1]]
    if before and largest > max(1.0, _MANY * max(before)):
        steps = max(map(len, history.values()))
        return (
            f"the largest weight went from {max(before):.3g} to {largest:.3g} ({name}) "
            f"within the last {steps} steps"
        )
    if largest > _LARGE:
        return f"the largest weight is {largest:.3g} ({name})"
    return ""
