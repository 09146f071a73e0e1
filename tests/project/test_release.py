"""Releases: the sources that are packed hold all that compiles and tests them."""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from processes import python

import overflow_fast

ROOT = Path(__file__).parents[2]
VERSION = overflow_fast.__version__


# With the package that was installed, and not the one in the folder of its sources.
RUNS_TESTS = """
import sys
sys.path = [each for each in sys.path if each]
import overflow_fast, pytest
assert overflow_fast.__file__.startswith(sys.argv[1]), overflow_fast.__file__
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The files of a source distribution, as setuptools would pack them."""
    folder = tmp_path_factory.mktemp("metadata")
    command = ("setup.py", "-q", "egg_info", "--egg-base", str(folder))
    done = python(*command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    names = (folder / "overflow_fast.egg-info/SOURCES.txt").read_text().splitlines()
    return set(map(os.path.normpath, names))


def written(*folders):
    """The files of these folders that a person wrote."""
    for folder in folders:
        for path in (ROOT / folder).rglob("*"):
            name = path.relative_to(ROOT).as_posix()
            is_made = re.search(r"__pycache__|\.(so|pyc|log)$|/\.", name)
            if path.is_file() and not is_made:
                yield name


def test_all_sources_are_packed(packed):
    folders = ("csrc", "overflow_fast", "tests", "docs", "examples", "tools", ".github")
    lacking = set(written(*folders)) - packed
    assert sorted(lacking) == []


def test_no_binary_is_packed(packed):
    folders = {name.split("/")[0] for name in packed}
    assert not folders & {"build", "dist", ".venv"}
    assert [name for name in packed if name.endswith((".so", ".pyc", ".o"))] == []


def test_what_sources_include_is_packed(packed):
    for name in packed:
        if re.search(r"\.(cpp|cu|cuh|h|inc|metal)$", name) is None:
            continue
        for included in re.findall(
            r'^#include "([^"]+)"', (ROOT / name).read_text(), re.M
        ):
            places = (ROOT / name).parent, ROOT / "tests/cpp", ROOT
            found = [
                place / included for place in places if (place / included).exists()
            ]
            if found:
                relative = found[0].resolve().relative_to(ROOT).as_posix()
                assert relative in packed, f"{name} includes {included}"


def test_the_version_has_a_dated_entry_in_the_changelog():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    entry = rf"^## {re.escape(VERSION)} \(\d{{4}}-\d\d-\d\d\)$"
    assert re.search(entry, changelog, re.M)


@pytest.mark.release
def test_the_packed_sources_compile_and_pass_tests(tmp_path):
    environment = os.environ | {"OVERFLOW_FAST_CUDA": "0"}
    run = {"cwd": tmp_path, "check": True, "env": environment}
    build = "import sys, setuptools.build_meta as b; b.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tmp_path], **run | {"cwd": ROOT})
    archive = tmp_path / f"overflow_fast-{VERSION}.tar.gz"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation"]
    subprocess.run([*pip, "--no-deps", "--target", tmp_path / "site", archive], **run)
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    environment["PYTHONPATH"] = str(tmp_path / "site")
    shown = [sys.executable, "-m", "overflow_fast", "env"]
    assert "kernels: cpu" in subprocess.check_output(
        shown, cwd=tmp_path, env=environment, text=True
    )
    unpacked = tmp_path / f"overflow_fast-{VERSION}"
    files = ["tests/scanner/test_scan.py", "tests/guard/test_guard.py"]
    chosen = ["-q", "-k", "auto or metal or test_guard", *files]
    subprocess.run(
        [sys.executable, "-c", RUNS_TESTS, str(tmp_path / "site"), *chosen],
        **run | {"cwd": unpacked},
    )
