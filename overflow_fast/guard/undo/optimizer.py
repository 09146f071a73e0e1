"""An optimizer with its weights and its state, to undo a step that is skipped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from ...scanner.ops import scan
from ..optimizers.held_optimizers import is_optimizer
from ..watching.inputs import is_plain
from .kept_objects import KeptObjects
from .tensors import KeptTensor


class OptimizerSnapshot:
    """The attributes of an optimizer, with all tensors in them, as they are now.

    Includes parameters, state, groups, all that its containers hold, and the same of
    optimizers among its attributes. Containers and tensors keep their identity when
    they are restored. Copies the parameters and their state: it is made for a step with
    a closure, or whose update may overflow, and for no other.

    Args:
        optimizer: The optimizer.
        can_restore: False where its step cannot be undone, as that of an engine, whose
            gradients are used up and whose counters have risen: nothing is copied. It
            is only looked at, which incurs a CPU-GPU sync.

    Attributes:
        can_restore: The same.
    """

    def __init__(self, optimizer: Any, can_restore: bool = True) -> None:
        self.can_restore = can_restore
        self._objects = _objects_of(optimizer)
        named = list(self._objects.tensors.values())
        self._was_finite = can_restore or _are_finite(named)
        with torch.no_grad():
            self._tensors = [
                (name, KeptTensor(tensor, is_copied=True))
                for name, tensor in (named if can_restore else ())
            ]

    def was_finite(self) -> bool:
        """True if weights and state were finite. Incurs a CPU-GPU sync."""
        copies = [(name, each.copied) for name, each in self._tensors]
        known = [(name, each) for name, each in copies if each is not None]
        return self._was_finite and _are_finite(known)

    def held(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns what a tensor held; None if it was not there, or not copied."""
        kept = (each for _, each in self._tensors if each.tensor is tensor)
        return next((each.copied for each in kept), None)

    def attributes(self, optimizer: Any) -> dict[str, Any]:
        """Returns the attributes that an optimizer had, such as counters."""
        return self._objects.attributes(optimizer)

    def restore(self) -> None:
        """Restores everything but the gradients, which stay as they are."""
        if not self.can_restore:
            return
        self._objects.restore()
        with torch.no_grad():
            for _, kept in self._tensors:
                kept.restore(is_write=True)


def _objects_of(optimizer: Any) -> KeptObjects:
    objects = KeptObjects(opens=lambda each: each is optimizer or is_optimizer(each))
    objects.add([("", optimizer)])
    return objects


# A learning rate that is a tensor is no state that a step starts from.
_SETTING = re.compile(r"\.(defaults|param_groups\[\d+\])\['(?!params'\])")


def _are_finite(named: Sequence[tuple[str, torch.Tensor]]) -> bool:
    plain = [t for name, t in named if is_plain(t) and not _SETTING.search(name)]
    return all(stat.is_finite for stat in scan(plain))
