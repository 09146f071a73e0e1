"""How near a forward's output with a remedy is to that of a run in a wider dtype.

A forward without a backward is good for its output alone: one that is finite and far
from what a wider dtype gives is as wrong as a nan, and harder to see. That is float32
where anything is half precision. Else it is float64, in which a step is run for its
true loss anyway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...base.modules import tensors_of
from ...base.tensors import HALF
from ..bounds import tolerance
from ..replayer import LastOutputs, Patch, Replayer, ReplayResult, StepPart
from .patches import Eagerly, InDtype

_IN_FLOAT32 = InDtype(torch.float32)


class Nearness:
    """Measures what the last call of a run returns against its output in a wider dtype.

    Args:
        replayer: Runs the calls.

    Attributes:
        wide: The name of that dtype.
    """

    def __init__(self, replayer: Replayer) -> None:
        self._replayer = replayer
        self.wide = "float32" if self._has_half() else "float64"
        self._reference: list[torch.Tensor] | None = None

    @property
    def has_true_output(self) -> bool:
        """True if the output in float64 is known, and is what is compared with."""
        return bool(self._reference) and self.wide == "float64"

    def note_in_float64(self, result: ReplayResult, outputs: LastOutputs) -> None:
        """Takes in a run in float64, which tells nothing where it is not finite."""
        if result.error is None and result.is_clean and self.wide == "float64":
            self._reference = outputs.tensors

    def distance(self, own: LastOutputs, others: Sequence[Patch] = ()) -> float | None:
        """The largest relative L2 difference of a tensor; None if it is not known.

        It is inf for another shape, such as that of other boxes that are kept.

        Args:
            own: What a run has returned.
            others: The patches that each run has in place.
        """
        if self._reference is None and self.wide == "float32":
            self._reference = self._in_float32(others)
        return _distance(own.tensors, self._reference or [])

    def judged(
        self, own: LastOutputs, patches: Sequence[Patch], others: Sequence[Patch]
    ) -> dict[str, Any]:
        """The fields of a remedy that say how far off the last output is.

        Args:
            own: What the run with it has returned.
            patches: The remedy.
            others: The patches that each run has in place.
        """
        distance = self.distance(own, others)
        dtypes = [each.dtype for each in patches if isinstance(each, InDtype)]
        is_far = distance is not None and distance > tolerance(dtypes)
        found = {"error": distance, "misses": "output" * is_far}
        return {**found, "compared_with": self.wide}

    def _in_float32(self, others: Sequence[Patch]) -> list[torch.Tensor]:
        found = LastOutputs()
        # Compiled code has casts of its own, which no autocast changes any more.
        patches = [*others, Eagerly(), _IN_FLOAT32]
        result = self._replayer.run(StepPart(), patches, [found])
        return found.tensors if result.error is None and result.is_clean else []

    def _has_half(self) -> bool:
        calls = self._replayer.calls
        models = self._replayer.models.values()
        return (
            any(t.dtype in HALF for model in models for t in tensors_of(model))
            or any(t.dtype in HALF for call in calls for _, t in call.leaves())
            or any(is_on for call in calls for _, is_on, _ in call.ambient.autocast)
        )


def _distance(
    own: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]
) -> float | None:
    if len(own) != len(reference):  # it is not known
        return None
    if [t.shape for t in own] != [t.shape for t in reference]:
        return math.inf
    pairs = zip(own, reference, strict=True)
    found = [_difference(one.double(), true.double()) for one, true in pairs]
    return None if any(map(math.isnan, found)) else max(found, default=None)


def _difference(value: torch.Tensor, true: torch.Tensor) -> float:
    # What a mask leaves at -inf, in both, is no difference.
    is_same = value == true
    error = torch.where(is_same, 0.0, value - true).norm()
    norm = torch.where(is_same & true.isinf(), 0.0, true).norm()
    return float(error / norm) if float(norm) > 0 else float(error)
