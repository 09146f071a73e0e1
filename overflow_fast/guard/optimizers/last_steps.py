"""The settings of optimizers' last steps, and weights before and after steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ... import _C
from ...base.modules import named_buffers, named_parameters, stepped_by
from ...base.tensors import is_readable

_NUMBERS = (float, int, tuple, list)
_KEPT = 16  # steps whose settings are kept, as many as weights' magnitudes are
_SMALL = 16  # elements of a weight that is kept as it was at first; chosen


class _LastStep(NamedTuple):
    settings: deque[list[dict[str, Any]]]  # of the last steps
    versions: list[int]
    weights: list[int]  # their ids: a weak reference would keep one from being swapped
    shapes: list[torch.Size]


class LastSteps:
    """The settings of optimizers' last steps, and the versions of weights after them.

    Both may have changed when a weight is found to be non-finite: a scheduler sets the
    next learning rate, and other code writes to weights.

    Args:
        models: The models, by what their modules' names begin with.

    Attributes:
        first: Small weights and buffers, by name, as they are now, which is before the
            first step.
    """

    def __init__(self, models: Mapping[str, nn.Module] | None = None) -> None:
        self._of: WeakKeyDictionary[Any, _LastStep] = WeakKeyDictionary()
        self.first = {
            f"{prefix}{name}": each.detach().clone()
            for prefix, model in (models or {}).items()
            for name, each in (*named_parameters(model), *named_buffers(model))
            if is_readable(each) and each.is_floating_point()
            if 0 < each.numel() <= _SMALL
        }

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes in a step that was made. Does not incur a CPU-GPU sync."""
        stepped, last = stepped_by(optimizer), self._of.get(optimizer)
        settings = deque(maxlen=_KEPT) if last is None else last.settings
        settings.append([_numbers_of(group) for group in optimizer.param_groups])
        self._of[optimizer] = _LastStep(
            settings,
            _C.versions_of(stepped),
            list(map(id, stepped)),
            [each.shape for each in stepped],
        )

    def settings(
        self, optimizer: torch.optim.Optimizer, place: int
    ) -> list[Mapping[str, Any]]:
        """The numbers among a group's settings in the last steps, the oldest first."""
        last = self._of.get(optimizer)
        steps = [] if last is None else last.settings
        return [each[place] for each in steps if place < len(each)]

    def writes_since(
        self, optimizer: torch.optim.Optimizer, weight: torch.Tensor
    ) -> int:
        """The number of writes to a weight since, by its version; 0 if not known."""
        last, weights = self._of.get(optimizer), stepped_by(optimizer)
        if last is None or len(weights) != len(last.versions):
            return 0
        pairs = zip(weights, last.versions, strict=True)
        before = [version for each, version in pairs if each is weight]
        return max(0, _C.versions_of([weight])[0] - before[0]) if before else 0

    def shape_before(
        self, optimizer: torch.optim.Optimizer, weight: torch.Tensor
    ) -> torch.Size | None:
        """The shape of the weight that the last step had in the place of this one.

        None for the same weight, and where that is not known.
        """
        last, weights = self._of.get(optimizer), stepped_by(optimizer)
        if last is None or len(weights) != len(last.weights):
            return None
        places = [i for i, each in enumerate(weights) if each is weight]
        if not places or last.weights[places[0]] == id(weight):
            return None
        return last.shapes[places[0]]


def _numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings to keep: what holds a model, or an optimizer, keeps it alive."""
    return {k: v for k, v in group.items() if type(v) in _NUMBERS and k != "params"}
