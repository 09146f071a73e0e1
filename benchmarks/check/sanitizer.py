"""compute-sanitizer's tools: over the program without torch, then over a few tests."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from check.kernel import program
from check.record import ROOT, find_nvcc
from check.tools import options, save, skip

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FEW = "test_layouts or test_planted_values or test_lists_of_any_length"
REFUSED = ("Device not supported", "device is not supported", "Unable to find")


def find_sanitizer() -> str | None:
    """compute-sanitizer, in PATH or beside nvcc."""
    beside = Path(find_nvcc() or "/usr/local/cuda/bin/nvcc").parent
    folders = os.pathsep.join([os.environ.get("PATH", ""), str(beside)])
    return shutil.which("compute-sanitizer", path=folders)


def run(tool: str, sanitizer: str, command: list[str]) -> tuple[int, str]:
    """The exit status, and what was said."""
    flags = ["--tool", tool, "--error-exitcode", "9"]
    if command[0] == sys.executable:  # torch has kernels of its own
        flags += ["--kernel-regex", "kns=overflow_fast"]
    done = subprocess.run(
        [sanitizer, *flags, *command],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    print(f"-- {tool}: {' '.join(command[:4])}: status {done.returncode}", flush=True)
    print(done.stdout[-6000:], flush=True)
    return done.returncode, done.stdout


def few_tests() -> list[str] | None:
    if not importlib.util.find_spec("pytest"):
        return None
    files = ["tests/scan/test_scan.py", "tests/scan/test_cuda.py"]
    chosen = ["-q", "-p", "no:cacheprovider", "-k", f"cuda and ({FEW})"]
    return [sys.executable, "-m", "pytest", *chosen, *files]


def main() -> int:
    if options().device == "cpu":
        skip("compute-sanitizer needs a GPU; `make sanitize` checks the emulation")
    sanitizer = find_sanitizer()
    if sanitizer is None:
        skip("compute-sanitizer was not found")
    part: dict[str, object] = {"lacking": [], "headlines": []}
    commands = {"program": [str(program("cuda")), "few"], "tests": few_tests()}
    has_failed = False
    for name, command in commands.items():
        if command is None:
            part["lacking"] = ["pytest is missing: only the program was checked"]
            continue
        for tool in TOOLS if name == "program" else TOOLS[:3]:
            code, said = run(tool, sanitizer, command)
            if any(word in said for word in REFUSED):
                skip(f"{tool} refuses this device")
            has_failed |= code != 0
            part[f"{tool} of the {name}"] = code
            save("sanitizer", part)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
