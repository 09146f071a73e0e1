"""Installs a wheel beside several releases of torch and runs tests with each.

    python tools/try_wheel.py wheelhouse/overflow_fast-*.whl venvs/torch-*/bin/python

Each Python given has a torch and pytest. The wheel goes into a fresh environment that
sees the packages of that one, in a folder with the tests and without the package's
sources. Prints a row of a Markdown table for each. Exit status: 1 if a test failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = (
    "tests/guard/test_guard.py",
    "tests/guard/test_guard_state.py",
    "tests/guard/test_skip.py",
    "tests/detector/test_export.py",
    "tests/scanner/test_ops.py",
)
WHERE = """
import overflow_fast, torch
from pathlib import Path
from overflow_fast import _C
print(torch.__version__, Path(_C.__file__).parent.name)
"""


def said(*command: object) -> str:
    """Returns what a command prints; ends the program with it if the command fails."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {done.stdout}{done.stderr}")
    return done.stdout.strip()


def fresh_environment(folder: Path, with_torch: Path, wheel: Path) -> Path:
    """Makes a virtual environment with this wheel and returns its Python.

    Args:
        folder: where to make it.
        with_torch: a Python whose packages, such as torch, it sees too.
        wheel: what is installed into it.
    """
    said(with_torch, "-m", "venv", "--without-pip", folder)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    python = folder / "bin" / "python"
    site, others = Path(said(python, "-c", ask)), said(with_torch, "-c", ask)
    (site / "torch_of_another.pth").write_text(others + "\n")
    options = ("--no-deps", "--force-reinstall", "--ignore-installed", "-q")
    said(with_torch, "-m", "pip", "--python", python, "install", *options, wheel)
    return python


def try_with(with_torch: Path, wheel: Path, folder: Path) -> tuple[str, bool]:
    """Runs the tests with one release of torch.

    Returns:
        A row of the table: torch, the extension that was chosen, the tests; and whether
        all of them passed.
    """
    python = fresh_environment(folder / "environment", with_torch, wheel)
    for name in ("tests", "benchmarks", "docs"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    os.chdir(folder)
    torch, binary = said(python, "-c", WHERE).splitlines()[-1].split()
    pytest = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS],
        capture_output=True,
        text=True,
    )
    lines = pytest.stdout.strip().splitlines() or [pytest.stderr]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    print("\n".join(failed), file=sys.stderr)
    row = f"| {torch} | `{binary}` | {lines[-1].strip('= ')} |"
    return row, pytest.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("pythons", type=Path, nargs="+", metavar="PYTHON")
    options = parser.parse_args()
    print("| torch | extension | tests |\n|---|---|---|")
    all_passed = True
    for python in options.pythons:
        with tempfile.TemporaryDirectory() as folder:
            where = options.wheel.resolve(), Path(folder)
            row, has_passed = try_with(python.absolute(), *where)
            os.chdir(ROOT)
        print(row, flush=True)
        all_passed &= has_passed
    sys.exit(not all_passed)


if __name__ == "__main__":
    main()
