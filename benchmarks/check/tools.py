"""What the commands of the stages share: their options, skipping, compiling."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from check.record import ROOT, commit, find_nvcc, nvidia_smi, said, write_json
from check.stages import SKIPPED

BUILD = ROOT / "build"


def options(*more: str) -> argparse.Namespace:
    """`--device` and `--quick`, and positional arguments by their names."""
    parser = argparse.ArgumentParser()
    for name in more:
        parser.add_argument(name)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args()


def skip(reason: str) -> NoReturn:
    """Ends a command that cannot do its work here."""
    print(f"skipped: {reason}", flush=True)
    sys.exit(SKIPPED)


def save(name: str, part: dict[str, Any]) -> None:
    """Writes a part of the results, where the check runs this command."""
    if os.environ.get("CHECK_OUT"):
        path = Path(os.environ["CHECK_OUT"]) / f"{name}.json"
        write_json(path, {"commit": commit(), **part})


def capability() -> str | None:
    """The GPU's compute capability such as 9.0, from the driver, else from torch."""
    if found := nvidia_smi().get("compute_cap"):
        return found
    ask = "import torch; print('%d.%d' % torch.cuda.get_device_capability())"
    return said([sys.executable, "-c", ask], 60) or None


def targets(nvcc: str, found: str | None) -> list[str]:
    """nvcc's options for a GPU; for one it does not know, what the driver compiles.

    Args:
        nvcc: The compiler.
        found: The compute capability, None if it is not known.
    """
    known = [name[8:] for name in said([nvcc, "--list-gpu-arch"]).split()]
    plain = [name for name in known if name.isdigit() and int(name) >= 80]
    wanted = (found or "").replace(".", "")
    if wanted in known:
        return ["-gencode", f"arch=compute_{wanted},code=sm_{wanted}"]
    if wanted and plain:
        older = [n for n in plain if int(n) <= int(wanted)] or plain[:1]
        newest = max(older, key=int)
        return ["-gencode", f"arch=compute_{newest},code=compute_{newest}"]
    hopper = ["-gencode", "arch=compute_90,code=sm_90"] if "90" in known else []
    return [*hopper, "-gencode", "arch=compute_80,code=[sm_80,compute_80]"]


def compile_all(commands: Sequence[Sequence[str]]) -> bool:
    """Runs compilers side by side and prints what they say; whether all succeeded."""

    def run(command: Sequence[str]) -> bool:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode or done.stderr:
            print(shlex.join(command), done.stdout, done.stderr, sep="\n", flush=True)
        return done.returncode == 0

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return all(pool.map(run, commands))


def nvcc_or_skip() -> str:
    """The path of nvcc; ends the command where there is none."""
    return find_nvcc() or skip("nvcc was not found (set CUDA_HOME)")
