"""What a result belongs to, and the files of a check."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("csrc", "overflow_fast", "benchmarks", "tests", "setup.py", "pyproject.toml")
KINDS = {".py", ".pyi", ".cpp", ".h", ".inc", ".cu", ".cuh", ".toml", ".txt"}
PACKAGES = ("torch", "transformers", "pytest", "xdist", "hypothesis", "lightning")
PACKAGES += ("accelerate", "ninja", "numpy")

# Prints the facts that only torch knows, in a process of its own: a broken torch or
# driver ends that process, not the check.
PROBE = """
import importlib.util, json, sys
facts = {"missing": [n for n in sys.argv[1:] if importlib.util.find_spec(n) is None]}
try:
    import torch
    facts |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        facts |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(total / 2**30, 1),
            "free_gib": round(free / 2**30, 1),
            "gpus": torch.cuda.device_count(),
        }
except Exception as error:
    facts["torch"] = f"{type(error).__name__}: {error}"[:300]
print("\\n" + json.dumps(facts))
"""


def source_files(root: Path = ROOT) -> Iterator[Path]:
    """The files that a result depends on, in order."""
    for name in SOURCES:
        path = root / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            is_result = "results" in file.parts or "__pycache__" in file.parts
            if file.suffix in KINDS and file.is_file() and not is_result:
                yield file


def source_hash(root: Path = ROOT) -> str:
    """A short hash of the sources' names and contents."""
    digest = hashlib.sha256()
    for file in source_files(root):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


def said(command: list[str], seconds: float = 20) -> str:
    """What a command prints, nothing if it fails, hangs or is not there."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, cwd=ROOT
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@functools.cache
def commit() -> str:
    """`COMMIT`, else git's, with a mark if sources were changed, else "unknown"."""
    if given := os.environ.get("COMMIT"):
        return given
    head = said(["git", "rev-parse", "--short", "HEAD"])
    if not head:
        return "unknown"
    tracked = ["git", "status", "--porcelain", "-uno", "--", *SOURCES]
    is_clean = said([*tracked, ":!benchmarks/results"]) == ""
    return head if is_clean else f"{head}, changed"


def facts(device: str) -> dict[str, Any]:
    """The commit, the software and the device that all results belong to."""
    found: dict[str, Any] = {
        "commit": commit(),
        "sources": source_hash(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": device,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    lines = said([sys.executable, "-c", PROBE, *PACKAGES], 90).splitlines()
    found |= json.loads(lines[-1]) if lines else {"torch": "the probe of torch failed"}
    if device == "cuda":
        found |= nvidia_smi()
        release = re.search(r"release ([\d.]+)", said([find_nvcc() or "", "--version"]))
        found["nvcc"] = release[1] if release else None
    return found


def nvidia_smi() -> dict[str, str]:
    """The driver's view: works without torch. MIG and clocks are only read."""
    fields = "name,compute_cap,driver_version,mig.mode.current,utilization.gpu"
    fields += ",memory.used,clocks.sm,clocks.mem,clocks.max.sm"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", "0"]
    cells = said(query).split(", ")
    names = fields.split(",")
    return dict(zip(names, cells, strict=True)) if len(cells) == len(names) else {}


def find_nvcc() -> str | None:
    """CUDA's compiler: that of CUDA_HOME, of PATH, of the usual folder, of pip."""
    folders = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    found = [Path(folder) / "bin/nvcc" for folder in folders if folder]
    found += [Path(p) / "nvcc" for p in os.environ.get("PATH", "").split(os.pathsep)]
    found += [Path("/usr/local/cuda/bin/nvcc"), Path("/opt/cuda/bin/nvcc")]
    found += sorted(Path("/usr/local").glob("cuda-*/bin/nvcc"), reverse=True)
    for folder in sys.path:
        found += Path(folder or ".").glob("nvidia/*/bin/nvcc")
    return next((str(path) for path in found if os.access(path, os.X_OK)), None)


def write_whole(path: Path, text: str) -> None:
    """Writes a file at once: who is killed meanwhile leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def write_json(path: Path, value: object) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """A file's content, None if there is none or it is no JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
