"""Exports the guard's metrics to TensorBoard."""

from __future__ import annotations

import os
from typing import Any

from ..guard.kinds import Metrics, check_int

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise ImportError(
        "overflow_fast.integrations.tensorboard needs tensorboard: run "
        f"`pip install tensorboard` ({error})"
    ) from error


class TensorBoardMetrics:
    """Writes a guard's metrics as scalars: `OverflowGuard(..., metrics=this)`.

    A pickled one writes to a new file in the same folder.

    Args:
        writer: A SummaryWriter, or the folder for one, or None for its default folder.
        every: Write one step in this many.

    Raises:
        TypeError, ValueError: If `every` is no int of at least 1.

    Example:
        >>> metrics = TensorBoardMetrics("runs/guard", every=10)
    """

    def __init__(
        self,
        writer: SummaryWriter | str | os.PathLike[str] | None = None,
        every: int = 1,
    ) -> None:
        check_int("every", every, 1)
        is_writer = hasattr(writer, "add_scalar")
        self._writer: Any = writer if is_writer else SummaryWriter(writer)
        self._folder: str | None = None
        self._every = every

    def __getstate__(self) -> dict[str, Any]:
        # A writer has an open file and a thread.
        folder = getattr(self._writer, "log_dir", None)
        return {"_writer": None, "_folder": folder, "_every": self._every}

    def __call__(self, step: int, values: Metrics) -> None:
        """Writes the values of a step."""
        if step % self._every == 0:
            self._writer = self._writer or SummaryWriter(self._folder)
            for name, value in values.items():
                self._writer.add_scalar(f"overflow_fast/{name}", value, step)
