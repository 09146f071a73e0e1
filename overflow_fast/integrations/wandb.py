"""Exports the guard's metrics to Weights & Biases."""

from __future__ import annotations

from typing import Any

from ..guard.kinds import Metrics, check_int

try:
    import wandb
except ImportError as error:
    raise ImportError(
        "overflow_fast.integrations.wandb needs wandb: run `pip install wandb` "
        f"({error})"
    ) from error


class WandbMetrics:
    """Logs a guard's metrics to a run of wandb: `OverflowGuard(..., metrics=this)`.

    They join the row that the program logs next, so the run's steps stay the program's
    own; `overflow_fast/step` is the guard's number. A pickled one logs to the run that
    its process has then.

    Args:
        run: A run of wandb; None for the one that `wandb.init()` has begun by the time
            of the first step.
        every: Log one step in this many.
        commit: Write a row for each logged step, for programs that log nothing
            themselves.

    Raises:
        TypeError, ValueError: If `every` is no int of at least 1.

    Example:
        >>> metrics = WandbMetrics(every=10)
    """

    def __init__(self, run: Any = None, every: int = 1, commit: bool = False) -> None:
        check_int("every", every, 1)
        self._run = run
        self._every = every
        self._commit = commit

    def __getstate__(self) -> dict[str, Any]:
        return {"_run": None, "_every": self._every, "_commit": self._commit}

    def __call__(self, step: int, values: Metrics) -> None:
        """Logs the values of a step."""
        if step % self._every:
            return
        run = self._run or wandb.run
        if run is None:
            raise RuntimeError("there is no run of wandb: call wandb.init() first")
        named = {f"overflow_fast/{name}": value for name, value in values.items()}
        run.log({"overflow_fast/step": step, **named}, commit=self._commit)
