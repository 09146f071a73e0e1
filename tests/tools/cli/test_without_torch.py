"""Commands that read files start without torch, and answer as a program's call does."""

import subprocess
import sys

import pytest
from test_reading_commands import write_log

from overflow_fast.__main__ import main

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

READING = [
    "--version",
    "--help",
    "suspects guard.jsonl",
    "suspects guard.jsonl --json",
    "report --help",
    "rnu",
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    write_log(tmp_path / "guard.jsonl")


def by_call(capsys, arguments):
    """Status, output and errors of a command that a program runs."""
    capsys.readouterr()
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code or 0
    return status, *capsys.readouterr()


@pytest.mark.parametrize("typed", READING)
def test_a_command_that_reads_does_not_import_torch(typed, capsys, monkeypatch):
    arguments = typed.split()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "overflow_fast", *arguments],
        capture_output=True,
        text=True,
    )
    lines = done.stderr.splitlines(keepends=True)
    imported = [line.split("|")[-1].strip() for line in lines if "import time:" in line]
    assert "overflow_fast" in imported and "torch" not in imported
    said = "".join(line for line in lines if "import time:" not in line)
    monkeypatch.setattr(sys, "argv", ["overflow_fast/__main__.py"])
    assert (done.returncode, done.stdout, said) == by_call(capsys, arguments)
