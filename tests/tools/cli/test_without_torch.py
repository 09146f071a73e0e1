"""Commands that read files start without torch, and answer as a program's call does."""

import re
import subprocess
import sys

import pytest
from test_reading_commands import write_log, write_record

from overflow_fast.__main__ import main

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

READING = [
    "--version",
    "--help",
    "log guard.jsonl --bad",
    "log guard.jsonl --json",
    "log run.ofr",
    "log --help",
    "watch run.ofr --once",
    "watch run.ofr other.ofr --once --json",
    "export run.ofr other.ofr -o new.csv",
    "export run.ofr --steps --json -o new.csv",
    "export run.ofr -o new.txt",
    "report --help",
    "compare --help",
    "explain --help",
    "doctor --help",
    "rnu",
    "log guard.jsonl --stpe 3",
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    write_record(tmp_path / "run.ofr")
    write_record(tmp_path / "other.ofr", high=6e4, rank=1)
    write_log(tmp_path / "guard.jsonl")
    return tmp_path


def by_call(capsys, arguments):
    """Status, output and errors of a command that a program runs."""
    capsys.readouterr()
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code or 0
    return status, *capsys.readouterr()


def without_age(text):
    """Without the seconds since the records' fixed time, nine digits before a point."""
    return re.sub(r"\b\d{9}(\.\d+)?\b", "", text)


@pytest.mark.parametrize("typed", READING)
def test_a_command_that_reads_does_not_import_torch(typed, folder, capsys, monkeypatch):
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
    written = folder / "new.csv"
    content = written.read_bytes() if written.exists() else b""
    written.unlink(missing_ok=True)
    monkeypatch.setattr(sys, "argv", ["overflow_fast/__main__.py"])
    status, out, err = by_call(capsys, arguments)
    assert (done.returncode, said) == (status, err)
    assert without_age(done.stdout) == without_age(out)
    assert content == (written.read_bytes() if written.exists() else b"")
