"""The check for a machine with a GPU, as far as it runs without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_benchmark_of_the_gpu_check_runs(tmp_path):
    environment = os.environ | {"PYTHON": sys.executable, "GPU_RESULTS": str(tmp_path)}
    done = subprocess.run(
        ["bash", "benchmarks/gpu/check.sh", "--dry"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "| training step | bare | ours | ours, lagged | guard |" in done.stdout
    result = json.loads((tmp_path / "gpu-no-gpu.json").read_text())
    assert all(result[part]["rows"] for part in ("scan", "hooks", "models", "compile"))
