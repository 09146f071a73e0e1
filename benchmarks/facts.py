"""The facts that a result belongs to: commit, sources, GPU, compiler; writing files.

Imports only the standard library, so a broken torch or driver breaks none of it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("csrc", "overflow_fast", "benchmarks", "tests", "setup.py", "pyproject.toml")
KINDS = {".py", ".pyi", ".cpp", ".h", ".inc", ".cu", ".cuh", ".toml", ".txt"}
SKIPPED = 77  # exit status of a script that cannot do its work here, and says why


def source_hash() -> str:
    """A short hash of the names and contents of the files that a result depends on."""
    digest = hashlib.sha256()
    for source in SOURCES:
        for path in sorted([ROOT / source, *(ROOT / source).rglob("*")]):
            name = path.relative_to(ROOT).as_posix()
            if path.suffix in KINDS and "/results/" not in name and path.is_file():
                digest.update(name.encode() + b"\0")
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def output_of(command: list[str], seconds: float = 20) -> str:
    """The output of a command; empty if it fails, hangs or does not exist."""
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
    head = output_of(["git", "rev-parse", "--short", "HEAD"])
    if not head:
        return "unknown"
    tracked = ["git", "status", "--porcelain", "-uno", "--", *SOURCES]
    is_clean = output_of([*tracked, ":!benchmarks/results"]) == ""
    return head if is_clean else f"{head}, changed"


def origin() -> dict[str, str]:
    """The sources and the day that a result is of."""
    return {
        "python": platform.python_version(),
        "commit": commit(),
        "sources": source_hash(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def nvidia_smi() -> dict[str, str]:
    """The driver's view, which needs no torch. MIG and clocks are only read."""
    fields = "name,compute_cap,driver_version,mig.mode.current,utilization.gpu"
    fields += ",memory.total,memory.used,clocks.sm,clocks.mem,clocks.max.sm"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", "0"]
    cells = output_of(query).split(", ")
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
    """Writes a file at once: a process killed meanwhile leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The lines of a table in Markdown, empty where a row lacks a column."""
    cells = [[str(row.get(column, "")) for column in columns] for row in rows]
    lines = ["| " + " | ".join(each) + " |" for each in (columns, *cells)]
    return [lines[0], "|" + "---|" * len(columns), *lines[1:]]


def write_json(path: Path, value: object) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n")
