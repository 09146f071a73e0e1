"""DeepSpeed's engine, where it is installed: two ranks, two micro-batches a step."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "deepspeed_run.py"
BAD = 3
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"
    ),
]


def train(*arguments, world=2):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with tempfile.TemporaryDirectory() as folder:
        command = [*launcher, f"--nproc-per-node={world}", str(SCRIPT), folder]
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=300
        )
        files = sorted(Path(folder).glob("*.json"))
        assert len(files) == world, done.stderr[-2000:]
        return [json.loads(each.read_text()) for each in files]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", "0123")
def test_a_healthy_run_is_silent_and_the_same_bit_for_bit(stage, dtype):
    bare = train(stage, dtype, "none", "none", "all")
    guarded = train(stage, dtype, "none", "skip", "all")
    for one, other in zip(bare, guarded, strict=True):
        for key in ("digests", "losses", "scale", "engine_skipped"):
            assert one[key] == other[key], key
        assert (other["step"], other["warnings"]) == (None, [])
        assert other["guard_step"] == other["global_steps"]
    if dtype == "fp16" and stage != "0":
        assert guarded[0]["engine_skipped"] > 0  # the scale's search


@pytest.mark.parametrize("fault", ["input", "overflow", "backward"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", "0123")
def test_a_bad_step_is_skipped_by_all_ranks_in_its_own_step(stage, dtype, fault):
    if dtype == "fp16" and fault == "backward":
        pytest.skip("under a dynamic scale that is the scale's to find")
    for found in train(stage, dtype, fault, "skip", "all"):
        assert (found["step"], found["skipped"]) == (BAD, 1)
        assert [i + 1 for i, moved in enumerate(found["moved"]) if not moved] == [BAD]
        assert found["fqn"] in ("up", "down", "")
        assert "rank 1 of 2" in found["where"]
        assert found["scale"] == (16 if dtype == "fp16" else 1)


@pytest.mark.parametrize("stage", "0123")
def test_all_ranks_raise_and_no_weight_has_changed(stage):
    for found in train(stage, "bf16", "overflow", "raise", "all"):
        assert (found["raised"], found["step"]) == (BAD, BAD)
        assert found["moved"][-1] is False
        assert "bfloat16 overflow" in found["text"]


@pytest.mark.parametrize("stage", "123")
def test_a_tripwire_sees_what_the_engine_keeps(stage):
    for found in train(stage, "bf16", "backward", "skip", "tripwire"):
        assert (found["step"], found["skipped"]) == (BAD, 1)
