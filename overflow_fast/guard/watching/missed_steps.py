"""Notices steps that nobody judges: weights change from forward to forward.

The guard judges the steps of the optimizers that it was given. Where another one steps,
its hooks see forwards alone.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from ... import _C
from ...base.modules import is_sharded, modules_in, own_tensors
from ...torch_internals.module_internals import PARAMETERS

# Changes in a row. A first one may be a checkpoint that is loaded, or an initialization
# by batches; more leave a run unprotected for longer before that is said.
ENOUGH = 3
_MOST = 16  # parameters that are looked at: an optimizer that steps none is not seen

_State = tuple[list[int], list[bytes | None]]


class MissedSteps:
    """Counts changes of a model's weights between forwards that nobody has judged.

    Forwards of one step, as in gradient accumulation, find the weights as they were.
    Looks from the second forward since the last judgement on: most steps have one.
    """

    def __init__(self) -> None:
        # Where they are: torch swaps no tensor that has a weak reference.
        self._places: list[tuple[weakref.ref[nn.Module], str]] | None = None
        self._left: _State | None = None  # by the last forward
        self._has_forward = False
        self._num = 0

    def begin_forward(self) -> bool:
        """Called when an outermost forward with autograd begins.

        Returns:
            True from `ENOUGH` changes in a row on.
        """
        left, self._left = self._left, None
        self._num += left is not None and left != self._state()
        return self._num >= ENOUGH

    def end_forward(self, model: nn.Module | None) -> None:
        """Called when it has ended; what it wrote itself is no step."""
        if self._has_forward and model is not None:
            if self._places is None:
                self._places = _some_places(model)
            self._left = self._state()
        self._has_forward = True

    def restart(self) -> None:
        """Called when a step was judged, or will be, lagged."""
        self._has_forward, self._left, self._num = False, None, 0

    def _state(self) -> _State:
        held: list[torch.Tensor] = [
            weight
            for reference, name in self._places or ()
            if (module := reference()) is not None
            if type(weight := own_tensors(module, PARAMETERS).get(name)) is nn.Parameter
        ]
        # Fused optimizers write without a count of torch's.
        return _C.versions_of(held), _C.samples_of(held, 1)


def _some_places(model: nn.Module) -> list[tuple[weakref.ref[nn.Module], str]]:
    """Some of the weights that an optimizer may step; of shards none, which move."""
    if is_sharded(model):
        return []
    found = [
        (weakref.ref(module), name)
        for module in modules_in(model)
        for name, each in own_tensors(module, PARAMETERS).items()
        if type(each) is nn.Parameter and each.requires_grad
    ]
    return found[:: max(1, len(found) // _MOST)]
