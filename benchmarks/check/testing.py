"""Runs the tests that need a GPU, or all others, as far as their packages are there."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from check.record import ROOT
from check.tools import options, save, skip

MAX_PROCESSES = 16
LOCAL = (ROOT / "tests/support", ROOT / "benchmarks", ROOT)


def imported(tree: ast.Module) -> Iterator[str]:
    """The modules that a file imports when it is imported itself."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def missing_package(path: Path, seen: frozenset[Path] = frozenset()) -> str | None:
    """The first package that a file or its neighbours import and that is not there."""
    for name in imported(ast.parse(path.read_text())):
        top = name.split(".")[0]
        local = [folder / f"{top}.py" for folder in LOCAL]
        file = next((each for each in local if each.exists()), None)
        if file is not None and file not in seen:
            found = missing_package(file, seen | {path, file})
        elif file is None and not any((folder / top).is_dir() for folder in LOCAL):
            found = None if importlib.util.find_spec(top) else top
        else:
            found = None
        if found:
            return found
    return None


def without_missing() -> tuple[list[str], list[str]]:
    """Options that leave files out, and a sentence for each."""
    ignored, said = [], []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if package := missing_package(path):
            ignored.append(f"--ignore={path.relative_to(ROOT)}")
            said.append(f"{path.name} is left out: {package} is missing")
    return ignored, said


def command(kind: str, device: str, is_quick: bool) -> tuple[list[str], list[str]]:
    """pytest's command, and what it leaves out."""
    ignored, lacking = without_missing()
    chosen = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    chosen += ["-p", "check.pytest_record", "--continue-on-collection-errors", *ignored]
    if kind == "gpu":
        chosen += ["-m", "cuda", *["--require-cuda"] * (device == "cuda")]
    else:
        chosen += ["-m", "not cuda"]
        if importlib.util.find_spec("xdist"):
            processes = min(MAX_PROCESSES, os.cpu_count() or 1)
            chosen += ["-n", str(processes), "--dist", "loadfile"]
            chosen += ["--no-loadscope-reorder"]
        else:
            lacking.append("pytest-xdist is missing: the tests run one after the other")
    if is_quick:
        chosen += ["tests/core/test_names.py", "tests/scan/test_cuda.py"]
    return chosen, lacking


def main() -> int:
    chosen = options("kind")
    if not importlib.util.find_spec("pytest"):
        skip("pytest is missing")
    arguments, lacking = command(chosen.kind, chosen.device, chosen.quick)
    print("\n".join(lacking), flush=True)
    save("tests", {"lacking": lacking})
    # One thread each: the processes share the cores.
    settings = os.environ | ({"OMP_NUM_THREADS": "1"} if "-n" in arguments else {})
    return subprocess.run(arguments, cwd=ROOT, env=settings).returncode


if __name__ == "__main__":
    sys.exit(main())
