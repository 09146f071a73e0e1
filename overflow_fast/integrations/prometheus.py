"""Exports the guard's metrics to Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..guard.kinds import Metrics, check_int

try:
    from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        "overflow_fast.integrations.prometheus needs prometheus_client: run "
        f"`pip install prometheus_client` ({error})"
    ) from error

_TOTAL = "_total"


class PrometheusMetrics(Collector):
    """Offers a guard's metrics to Prometheus: `OverflowGuard(..., metrics=this)`.

    They are called `overflow_fast_bad_steps_total` and so on; see
    `OverflowGuard.metrics()`. A pickled one is not registered, and raises when it is
    used.

    Args:
        port: Serve them at this port of the machine; None if other code serves the
            registry. Processes on one machine need ports of their own.
        labels: Labels that distinguish this process, such as `{"rank": "3"}`.
        registry: The registry to register with.

    Raises:
        TypeError, ValueError: If the port is no int of at least 0.
        OSError: If it is taken.

    Example:
        >>> metrics = PrometheusMetrics(labels={"rank": "0"})
    """

    def __init__(
        self,
        port: int | None = None,
        labels: Mapping[str, str] | None = None,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._labels = dict(labels or {})
        self._values: Metrics = {}
        self._registry: CollectorRegistry | None = registry
        self._server: Any = None
        if port is not None:
            check_int("port", port, 0)
            try:
                self._server, _ = start_http_server(port, registry=registry)
            except OSError as error:
                raise OSError(
                    f"port {port} cannot be served: give each process of a machine its "
                    f"own, such as port={port} + the local rank, and close() one that "
                    f"this process has made before ({error})"
                ) from error
        registry.register(self)

    def close(self) -> None:
        """Unregisters the metrics, and frees the port."""
        if self._registry is not None:
            self._registry.unregister(self)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def __getstate__(self) -> dict[str, Any]:
        return {"_labels": self._labels, "_registry": None, "_server": None}

    def __call__(self, step: int, values: Metrics) -> None:
        """Stores the values of a step."""
        if self._registry is None:
            raise RuntimeError(
                "a pickled PrometheusMetrics is not registered, and its values are not "
                "served: make one in the process that trains"
            )
        self._values = values

    def collect(self) -> Iterator[Any]:
        """Yields the values when Prometheus collects them."""
        for name, value in self._values.items():
            is_counter = name.endswith(_TOTAL)
            family = CounterMetricFamily if is_counter else GaugeMetricFamily
            metric = family(
                f"overflow_fast_{name.removesuffix(_TOTAL)}",
                f"{name.removesuffix(_TOTAL).replace('_', ' ')} (see OverflowGuard)",
                labels=list(self._labels),
            )
            metric.add_metric(list(self._labels.values()), value)
            yield metric
