"""How near a forward's output with a remedy is to that of a run in float32.

A forward without a backward is good for its output alone: one that is finite and far
from what float32 gives is as wrong as a nan, and harder to see.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...base.modules import tensors_of
from ..bounds import tolerance
from ..calls import Call
from ..replayer import Observer, Patch, Replayer, StepPart
from ..tensor_kinds import floats_in
from ..wider import HALF
from .padding import Padding, find_padding
from .patches import Eagerly, InDtype

_IN_FLOAT32 = InDtype(torch.float32)


class Nearness(Observer):
    """Measures what the last call of a run returns against its output in float32.

    Args:
        replayer: Runs the calls.
    """

    def __init__(self, replayer: Replayer) -> None:
        self._replayer = replayer
        self._outputs: list[torch.Tensor] = []
        self._reference: list[torch.Tensor] | None = None
        self._padding: Padding | None = None
        self._has_looked_for_padding = False

    def on_output(self, call: Call, output: Any) -> None:
        """See `Observer`."""
        self._outputs = [each.detach().clone() for each in floats_in(output)]

    def distance(self, others: Sequence[Patch] = ()) -> float | None:
        """The largest relative L2 difference of a tensor of the run that was seen.

        None where that is not known: where nothing is half precision, or float32 is
        not finite either.

        Args:
            others: The patches that each run has in place.
        """
        if self._reference is None:
            self._reference = self._in_float32(others)
        return _distance(self._outputs, self._reference)

    def judged(
        self, patches: Sequence[Patch], others: Sequence[Patch]
    ) -> dict[str, Any]:
        """The fields of a remedy that say how far off the last output is.

        Args:
            patches: The remedy.
            others: The patches that each run has in place.
        """
        distance = self.distance(others)
        dtypes = [each.dtype for each in patches if isinstance(each, InDtype)]
        most, where = tolerance(dtypes), ""
        if distance is not None and distance > most:
            padding = self._found_padding(others)
            if padding is not None and self._reference is not None:
                pair = self._outputs, self._reference
                distance = _distance(*(list(map(padding.read, each)) for each in pair))
                where = padding.where
        is_far = distance is not None and distance > most
        return {"error": distance, "misses": "output" * is_far, "where": where}

    def _found_padding(self, others: Sequence[Patch]) -> Padding | None:
        if not self._has_looked_for_padding:
            self._has_looked_for_padding = True
            self._padding = find_padding(
                self._replayer.calls[-1],
                self._reference or [],
                lambda patch: self._in_float32([*others, patch]),
            )
        return self._padding

    def _in_float32(self, others: Sequence[Patch]) -> list[torch.Tensor]:
        if not self._has_half():
            return []
        own = self._outputs
        # Compiled code has casts of its own, which no autocast changes any more.
        patches = [*others, Eagerly(), _IN_FLOAT32]
        result = self._replayer.run(StepPart(), patches, [self])
        found, self._outputs = self._outputs, own
        return found if result.is_clean else []

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
    if [t.shape for t in own] != [t.shape for t in reference]:
        return None
    pairs = zip(own, reference, strict=True)
    found = [_difference(one.double(), true.double()) for one, true in pairs]
    return None if any(map(math.isnan, found)) else max(found, default=None)


def _difference(value: torch.Tensor, true: torch.Tensor) -> float:
    # What a mask leaves at -inf, in both, is no difference.
    is_same = value == true
    error = torch.where(is_same, 0.0, value - true).norm()
    norm = torch.where(is_same & true.isinf(), 0.0, true).norm()
    return float(error / norm) if float(norm) > 0 else float(error)
