"""A GPU belongs to its owner: nothing here changes its settings, MIG included."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUFFIXES = {".py", ".sh", ".cpp", ".cu", ".cuh", ".h", ".toml", ".yml", ".yaml", ""}
FOLDERS = ["benchmarks", "csrc", "overflow_fast", "tests", ".ci", ".github"]

# What nvidia-smi is asked first, where it is called.
FIRST = re.compile(r"nvidia-smi[\"',\s\[f]+(-{1,2}\w[\w-]*|mig\b|\w+\b)")
QUESTIONS = {"-L", "--list-gpus", "-q", "--query", "--query-gpu", "-i", "--id"}
QUESTIONS |= {"--query-compute-apps", "--help", "--version"}
SETTINGS = re.compile(
    r"--multi-instance-gpu|--gpu-reset|--persistence-mode|--power-limit|-mig\b"
    r"|--(lock|reset)-(gpu|memory)-clocks|--(reset-)?applications-clocks"
    r"|--compute-mode|--ecc-config|create-gpu-instance|nvmlDevice(Set|Create|Reset)"
)


def files():
    yield from (ROOT / name for name in ("Makefile", "setup.py"))
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in SUFFIXES and path != Path(__file__):
                yield path


def offences(text):
    """What in a program would change a GPU's settings."""
    asked = {found[1] for found in FIRST.finditer(text)}
    called = {word for word in asked if word.startswith("-") or word == "mig"}
    return sorted(called - QUESTIONS) + [m[0] for m in SETTINGS.finditer(text)]


def test_nothing_sets_anything():
    found = {path: offences(path.read_text(errors="ignore")) for path in files()}
    assert {path: what for path, what in found.items() if what} == {}


def test_settings_would_be_found():
    assert offences('run(["nvidia-smi", "-mig", "1"])') == ["-mig", "-mig"]
    assert offences("nvidia-smi mig -cgi 9") == ["mig"]
    assert offences('run(["nvidia-smi", "-i", "0", "--gpu-reset"])') == ["--gpu-reset"]
    assert offences("nvidia-smi -pm 1") == ["-pm"]
    assert offences('run(["nvidia-smi", f"--query-gpu={x}", "-i", "0"])') == []
