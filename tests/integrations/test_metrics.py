"""The guard's metrics in TensorBoard and for Prometheus."""

import socket
import sys
import urllib.request

import pytest
from guarding import three_steps

pytest.importorskip("tensorboard")
pytest.importorskip("prometheus_client")


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_gets_scalars(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    from overflow_fast.integrations.tensorboard import TensorBoardMetrics

    guard = three_steps(TensorBoardMetrics(tmp_path / "own"))
    found = scalars(tmp_path / "own")
    assert found.keys() == {f"overflow_fast/{name}" for name in guard.metrics()}
    assert found["overflow_fast/bad_steps_total"] == [(0, 0), (1, 1), (2, 1)]
    with SummaryWriter(tmp_path / "given") as writer:
        three_steps(TensorBoardMetrics(writer, every=2))
    found = scalars(tmp_path / "given")
    assert found["overflow_fast/skipped_steps_total"] == [(0, 0), (2, 1)]


def test_prometheus_is_given_counters_and_gauges(as_kept):
    from prometheus_client import CollectorRegistry, generate_latest

    from overflow_fast.integrations.prometheus import PrometheusMetrics

    registry = CollectorRegistry()
    metrics = PrometheusMetrics(labels={"rank": "3"}, registry=registry)
    assert generate_latest(registry) == b""
    three_steps(metrics)
    text = generate_latest(registry).decode()
    assert 'overflow_fast_bad_steps_total{rank="3"} 1.0' in text
    as_kept([each for each in text.splitlines() if each.startswith("# TYPE")])


def test_prometheus_is_served(as_kept):
    from prometheus_client import CollectorRegistry

    from overflow_fast.integrations.prometheus import PrometheusMetrics

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    metrics = PrometheusMetrics(port, registry=CollectorRegistry())
    three_steps(metrics)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        assert b"overflow_fast_steps_total 3.0" in answer.read()
    registry = CollectorRegistry()
    with pytest.raises(OSError) as raised:
        PrometheusMetrics(port, registry=registry)
    as_kept(str(raised.value).replace(str(port), "PORT"))
    metrics.close()
    again = PrometheusMetrics(port, registry=registry)
    again.close()
    PrometheusMetrics(registry=registry).close()


def test_wrong_arguments_are_told(tmp_path, as_kept):
    from overflow_fast.integrations.prometheus import PrometheusMetrics
    from overflow_fast.integrations.tensorboard import TensorBoardMetrics

    as_kept.error(ValueError, TensorBoardMetrics, tmp_path, every=0)
    as_kept.error(TypeError, PrometheusMetrics, "9400")


@pytest.mark.parametrize(
    "name, needed",
    [
        ("tensorboard", "torch.utils.tensorboard"),
        ("prometheus", "prometheus_client"),
        pytest.param("wandb", "wandb", marks=pytest.mark.slow),
        pytest.param("mlflow", "mlflow", marks=pytest.mark.slow),
    ],
)
def test_missing_libraries_are_told(name, needed, monkeypatch, as_kept):
    pytest.importorskip(needed)
    module = f"overflow_fast.integrations.{name}"
    __import__(module)
    monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, needed, None)
    as_kept.error(ImportError, __import__, module)
