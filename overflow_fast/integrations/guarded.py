"""What the callbacks of the trainers have in common."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..guard.guard import OverflowGuard


class GuardOwner:
    """Has a guard of its own for each training.

    Args:
        arguments: What `OverflowGuard` takes besides the model and the optimizer, by
            name.

    Attributes:
        guard: The guard of the last training, or None before the first.

    Raises:
        TypeError, ValueError: If an argument cannot be used.
    """

    def __init__(self, **arguments: Any) -> None:
        OverflowGuard(nn.Identity(), **arguments).remove()  # wrong ones are told now
        self._arguments = arguments
        self.guard: OverflowGuard | None = None

    def put_on(self, model: Any, optimizer: Any) -> OverflowGuard:
        """Puts a guard on; one that a training has left behind is taken off."""
        self.take_off()
        self.guard = OverflowGuard(model, optimizer, **self._arguments)
        return self.guard

    def take_off(self) -> None:
        """Takes the guard off, after its last verdict."""
        if self.guard is not None:
            self.guard.remove()
