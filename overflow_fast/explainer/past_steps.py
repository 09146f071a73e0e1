"""The largest magnitudes of weights, gradients and loss in the steps before a bad one.

A watch keeps a number of each finite entry, without the step that it is of: a step in
which it was not finite, or not looked at, is missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .. import _C
from ..base.tree import label_text
from ..guard.monitors.monitor import scalar_places
from ..guard.verdict.roles import GRADIENTS
from ..guard.watching.watch import ModelWatch

_KEPT = 16  # `kSteps` of csrc/record/headroom.h


@dataclass(frozen=True)
class PastSteps:
    """The largest magnitudes in the last steps, the oldest first.

    Attributes:
        weights: Of each weight, by name; the last one is that of the bad step.
        between: How many steps are between two of them.
        gradients: Of all gradients together, before the bad step.
        last_gradient: The largest finite one of all gradients that was seen last.
        finite_losses: What was recorded, or returned by a model, as "loss", where it
            was finite: of this step, too.
    """

    weights: Mapping[str, Sequence[float]] = field(default_factory=dict)
    between: int = 1
    gradients: Sequence[float] = ()
    last_gradient: float = 0.0
    finite_losses: Sequence[float] = ()


def past_steps_of(
    watches: Sequence[ModelWatch],
    between: int,
    dirty_gradients: Sequence[str],
    scans_gradients: bool,
) -> PastSteps:
    """The magnitudes that watches have kept. Does not incur a CPU-GPU sync.

    Args:
        watches: The watched models.
        between: How many steps are between two looks at weights; 0 if that varies.
        dirty_gradients: The names of the parameters with a bad gradient.
        scans_gradients: Whether gradients were looked at in the bad step.
    """
    weights: dict[str, list[float]] = {}
    gradients: dict[str, list[float]] = {}
    finite_losses: list[float] = []
    for watch in watches:
        loss = scalar_places(watch).get("loss")
        for history in watch.recorder.headroom():
            place, recent = history.last.place, history.recent
            label = place.label
            is_own = place.kind == _C.FrameKind.FORWARD and place.module == 0
            is_own |= place.kind == _C.FrameKind.RECORDED
            is_loss = loss is not None and _key(place) == _key(loss)
            if is_loss or (is_own and label_text(label) == "loss"):
                finite_losses += recent
            if label.role == _C.Role.WEIGHT:
                name = label.name
                if place.kind == _C.FrameKind.FORWARD:
                    name = f"{watch.name_at(place.module)}.{name}".lstrip(".")
                # A doubtful update is looked at again, which is no further step.
                weights[name] = max(weights.get(name, []), recent, key=len)
            elif place.kind in GRADIENTS and label.role == _C.Role.GRADIENT:
                gradients[label.name] = recent
    last = max((each[-1] for each in gradients.values() if each), default=0.0)
    dirty = set(dirty_gradients) if scans_gradients else gradients.keys()
    slopes = _together(  # that of the bad step last
        [*each, math.inf] if name in dirty else each for name, each in gradients.items()
    )
    return PastSteps(weights, between, slopes[:-1], last, finite_losses)


def _key(place: _C.Place) -> tuple[_C.FrameKind, int, str]:
    return place.kind, place.module, label_text(place.label)


def _together(histories: Iterable[Sequence[float]]) -> list[float]:
    """The largest of each step, of those that have been there for as long."""
    found = [each[-_KEPT:] for each in histories]
    num = max(map(len, found), default=0)
    whole = [each for each in found if len(each) == num]
    return [max(step) for step in zip(*whole, strict=True)]
