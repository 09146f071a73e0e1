"""Exports the guard's metrics to MLflow."""

from __future__ import annotations

from typing import Any

from ..guard.kinds import Metrics, check_int

try:
    import mlflow
except ImportError as error:
    raise ImportError(
        "overflow_fast.integrations.mlflow needs mlflow: run `pip install mlflow` (or "
        f"mlflow-skinny) ({error})"
    ) from error


class MlflowMetrics:
    """Logs a guard's metrics to a run of MLflow: `OverflowGuard(..., metrics=this)`.

    MLflow writes them in a thread of its own. `mlflow.flush_async_logging()` waits for
    that, as the end of the process does.

    Args:
        run_id: The run's id; None for the active run, which MLflow begins where there
            is none.
        every: Log one step in this many.

    Raises:
        TypeError, ValueError: If `every` is no int of at least 1.

    Example:
        >>> metrics = MlflowMetrics(every=10)
    """

    def __init__(self, run_id: str | None = None, every: int = 1) -> None:
        check_int("every", every, 1)
        self._run_id = run_id
        self._every = every

    def __call__(self, step: int, values: Metrics) -> None:
        """Logs the values of a step."""
        if step % self._every == 0:
            named = {f"overflow_fast/{name}": value for name, value in values.items()}
            log: Any = mlflow.log_metrics
            log(named, step=step, run_id=self._run_id, synchronous=False)
