"""The guard's metrics in wandb and MLflow, both offline."""

import json
import pickle
import struct
from pathlib import Path

import pytest
from guarding import three_steps

pytestmark = pytest.mark.slow


@pytest.fixture
def offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", project="p", dir=tmp_path) as begun:
        yield begun


def records(path):
    """The records of a file in LevelDB's log format, behind wandb's own 7 bytes."""
    data, at, parts = path.read_bytes(), 7, []
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts.clear()


def rows(begun):
    """The rows that an offline run has in its file."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    begun.finish()
    wandb.teardown()  # ends the process that writes the file
    found = []
    for data in records(Path(begun.settings.sync_file)):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            names = ["/".join(item.nested_key) or item.key for item in items]
            values = [json.loads(item.value_json) for item in items]
            found.append(dict(zip(names, values, strict=True)))
    return found


BLOCK = 2**15
BAD = "overflow_fast/bad_steps_total"


def test_wandb_gets_rows_of_its_own(offline):
    from overflow_fast.integrations.wandb import WandbMetrics

    guard = three_steps(WandbMetrics(commit=True))
    found = rows(offline)
    assert [row[BAD] for row in found] == [0, 1, 1]
    assert {f"overflow_fast/{name}" for name in guard.metrics()} <= found[0].keys()


def test_wandb_gets_no_rows_beside_the_programs(offline):
    from overflow_fast.integrations.wandb import WandbMetrics

    exporter = pickle.loads(pickle.dumps(WandbMetrics(every=2)))
    three_steps(exporter, after_step=lambda i: offline.log({"loss": i}))
    found = rows(offline)
    steps = [(row["loss"], row.get("overflow_fast/step")) for row in found]
    assert steps == [(0, 0), (1, None), (2, 2)]


def test_wandb_without_a_run_says_what_to_call():
    pytest.importorskip("wandb")
    from overflow_fast.integrations.wandb import WandbMetrics

    with pytest.raises(RuntimeError, match="call wandb"):
        WandbMetrics()(0, {})


def test_mlflow_gets_metrics(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    from overflow_fast.integrations.mlflow import MlflowMetrics

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as begun:
        guard = three_steps(MlflowMetrics())
        three_steps(pickle.loads(pickle.dumps(MlflowMetrics(every=2))))
        mlflow.flush_async_logging()
    client = mlflow.MlflowClient()
    history = client.get_metric_history(begun.info.run_id, BAD)
    # Several threads of mlflow's write, in an order of their own.
    values = sorted((m.step, m.value) for m in history)
    assert values == [(0, 0), (0, 0), (1, 1), (2, 1), (2, 1)]
    found = client.get_run(begun.info.run_id).data.metrics
    assert found.keys() == {f"overflow_fast/{name}" for name in guard.metrics()}
