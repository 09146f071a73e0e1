"""Shards add up: four ranks are compared with one, and a stale shard is named."""

import functools
import tempfile
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from compared_models import batch, tower
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import overflow_fast

pytestmark = pytest.mark.filterwarnings("ignore")
WORLD = 2


def fsdp():
    model = tower()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def tensor_parallel():
    model = tower()
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        plan = {
            "up": ColwiseParallel(use_local_output=False),
            "act": PrepareModuleInput(
                input_layouts=Shard(-1),
                desired_input_layouts=Shard(-1),
                use_local_output=False,
            ),
            "down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    return model


MODELS = {
    "ddp": lambda: DistributedDataParallel(tower()),
    "fsdp": fsdp,
    "tp": tensor_parallel,
}


def make_stale(model, name):
    """Leaves one rank's part of a weight as it was."""
    parameter = dict(model.named_parameters())[name]
    if dist.get_rank() == 1:
        with torch.no_grad():
            parameter.to_local().mul_(1.01)


def record(folder, kind, stale=""):
    model = MODELS[kind]()
    if stale:
        make_stale(model, stale)
    with overflow_fast.recording(folder, model):
        model(batch()).backward()


def record_all(folder):
    for kind in MODELS:
        record(f"{folder}/{kind}", kind)
    record(f"{folder}/stale", "fsdp", "blocks.1.up.weight")


@functools.cache
def folder():
    found = tempfile.mkdtemp()
    ranks.on_ranks(WORLD, record_all, found, over="gloo")
    model = tower()
    with overflow_fast.recording(f"{found}/one", model):
        model(batch()).backward()
    return Path(found)


@pytest.mark.parametrize("kind", MODELS)
def test_ranks_are_compared_with_one_process(kind):
    diff = overflow_fast.compare(folder() / kind, folder() / "one")
    assert diff.first is None, diff
    left_out = [each for each in diff.said if "not compared" in each]
    assert left_out == []
    assert f"{WORLD} ranks against 1." in diff.said
    gradients = [r for r in diff.rows if r.place.role == "parameter_gradient"]
    assert len(gradients) == len(list(tower().parameters()))
    assert all(row.shapes[0] == row.shapes[1] for row in diff.rows)


def test_parts_of_activations_are_put_together():
    diff = overflow_fast.compare(folder() / "tp", folder() / "one")
    rows = {str(row.place): row for row in diff.rows}
    row = rows["blocks.1.up: output"]
    assert row.relative < 1e-6 and row.shapes[0] == (4, 6, 128)


def test_a_stale_shard_is_named():
    diff = overflow_fast.compare(folder() / "stale", folder() / "fsdp")
    assert (diff.first.module, diff.first.row.rank) == ("blocks.1.up", 1)
    assert "on rank 1" in str(diff.first) and "up.weight: parameter" in str(diff.first)


def test_a_stale_shard_shows_against_one_process():
    diff = overflow_fast.compare(folder() / "stale", folder() / "one")
    assert (diff.first.module, diff.first.kind) == ("blocks.1.up", "weights")
    assert diff.first.row.rank is None


def test_a_missing_rank_is_said(tmp_path, as_kept):
    (tmp_path / "part").mkdir()
    data = (folder() / "fsdp" / "rank-0.step-0.jsonl").read_bytes()
    (tmp_path / "part" / "rank-0.step-0.jsonl").write_bytes(data)
    diff = overflow_fast.compare(tmp_path / "part", folder() / "one")
    as_kept([each for each in diff.said if "parts of" in each or "ranks." in each][:2])
