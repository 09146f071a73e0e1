"""The guard's metrics, and the exporters that receive them after each step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Metrics = Mapping[str, float]
Exporter = Callable[[int, Metrics], object]

_log = logging.getLogger("overflow_fast")


def exporters_of(metrics: Any) -> list[Exporter]:
    """The exporters in an argument that may be None, one, or several.

    Raises:
        TypeError: If one of them cannot be called.
    """
    is_one = callable(metrics) or not isinstance(metrics, Iterable)
    several = [metrics] if is_one else metrics
    several = [] if metrics is None else list(several)
    for each in several:
        if not callable(each) or isinstance(each, type):
            raise TypeError(
                "metrics must be a callable that takes the step and a dict of numbers, "
                "such as overflow_fast.integrations.tensorboard.TensorBoardMetrics(), "
                f"a list of them, or None, got {_name(each)}"
            )
    return several


def _name(each: object) -> str:
    if isinstance(each, type):
        return f"the class {each.__name__}"
    return type(each).__name__


class MetricsDispatcher:
    """Calls exporters. Logs the first failure of each; none stops the run."""

    def __init__(self, exporters: Sequence[Exporter]) -> None:
        self._exporters = exporters
        self._failed: set[int] = set()

    def emit(self, step: int, values: Callable[[], Metrics]) -> None:
        """Calls each exporter with the step and its values.

        Args:
            step: The step's number.
            values: Returns the values; called only if there is an exporter.
        """
        if not self._exporters:
            return
        made = values()
        for i, exporter in enumerate(self._exporters):
            try:
                exporter(step, made)
            except Exception:
                if i not in self._failed:
                    self._failed.add(i)
                    _log.warning(
                        "A metrics exporter failed. Its later failures are not logged.",
                        exc_info=True,
                    )
