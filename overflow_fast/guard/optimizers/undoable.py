"""An optimizer's step that may have to be undone."""

from __future__ import annotations

from typing import Any

from ..undo.optimizer import OptimizerSnapshot, is_finite


class UndoableStep:
    """The way to undo a step, where there is one, and what was finite before it.

    That of an engine cannot: its gradients are used up, and its counters have risen.

    Args:
        optimizer: The optimizer that has the weights and the state.
        snapshot: These as they were, or None where they cannot be put back.
    """

    def __init__(self, optimizer: Any, snapshot: OptimizerSnapshot | None) -> None:
        self._snapshot = snapshot
        self._was_finite = snapshot is None and is_finite(optimizer)

    @property
    def can_restore(self) -> bool:
        """True if the step can be undone."""
        return self._snapshot is not None

    def is_finite(self) -> bool:
        """True if all was finite before the step. Incurs a CPU-GPU sync."""
        if self._snapshot is None:
            return self._was_finite
        return self._snapshot.is_finite()

    def restore(self) -> None:
        """Undoes the step, if it can."""
        if self._snapshot is not None:
            self._snapshot.restore()
