"""Reads what guards of this and earlier runs have logged."""

from __future__ import annotations

from ..report.suspects import Suspects, read_incidents, suspects_of
from .loop import GuardLoop


class GuardLog:
    """The readings of a guard's log.

    Args:
        loop: The parts of the guard.
    """

    def __init__(self, loop: GuardLoop) -> None:
        self._loop = loop

    def suspects(self) -> Suspects:
        """Counts the incidents of each host and device, across restarts.

        Reads the log of all ranks and runs that lies at `log=` and beside it. An
        incident to which runs come again from a checkpoint counts once. Incurs no
        CPU-GPU sync.

        Returns:
            The table, the worst first; `print()` shows which node to drain.

        Raises:
            RuntimeError: If the guard has no `log`.
        """
        log = self._loop.config.log
        if log is None:
            raise RuntimeError("suspects() reads the log: give the guard log=")
        return suspects_of(read_incidents(log.path))
