"""suspects, report and env: what machines and readers get of a run's files."""

import json
import os
import re
import subprocess
import sys

import pytest
from flight_records import head_lines, step_line

from overflow_fast.__main__ import main
from overflow_fast.guard.files.json_text import line_bytes

RUN = {"models": ["Net"], "host": "a", "policy": "skip"}


def write_record(path, steps=3, high=4.0, **run):
    lines = [step_line(i, high=[high * 2**i] * 4) for i in range(steps)]
    for line in lines[1:2]:
        line.actions, line.num_skipped = {"skip": 1}, 1
    heads = head_lines(**{**RUN, **run})
    path.write_bytes(heads + b"".join(map(line_bytes, lines)))
    return str(path)


def write_log(path, rank=0, **run):
    run = {
        "kind": "run",
        "schema": 1,
        "run": f"r{rank}",
        "time": 1e9,
        "rank": rank,
        **run,
    }
    step = {"kind": "step", "run": f"r{rank}", "time": 1e9, "action": None}
    lines = [
        {"overflow_fast": "0.1", "models": ["Net"], "policy": "skip", **run},
        {
            **step,
            "step": 0,
            "is_clean": True,
            "headroom_bits": 3.5,
            "headroom_at": "h.0",
        },
        {
            **step,
            "step": 1,
            "is_clean": False,
            "action": "skip",
            "first": "h.0: output",
        },
        {**step, "step": 2, "is_clean": True},
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


def output_of(capsys, *arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_an_empty_record_is_one_sentence(tmp_path, capsys, monkeypatch, as_kept):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.ofr").write_bytes(b"")
    assert main(["report", "-o", "o.html", "run.ofr"]) == 2
    as_kept(capsys.readouterr().err)
    assert not (tmp_path / "o.html").exists()


# Files that cannot be read.


def wrong_files(folder):
    (folder / "folder").mkdir()
    (folder / "notes.txt").write_text("my notes\nand more\n")
    (folder / "newer.ofr").write_bytes(head_lines(schema=99))
    write_log(folder / "newer.jsonl", schema=99)


@pytest.mark.parametrize("command", ["report", "suspects"])
@pytest.mark.parametrize("name", ["missing", "folder", "notes.txt", "newer"])
def test_what_cannot_be_read_is_one_sentence(command, name, tmp_path, capsys, as_kept):
    wrong_files(tmp_path)
    if name == "newer":
        name = "newer.jsonl" if command == "suspects" else "newer.ofr"
    more = ["-o", str(tmp_path / "o.html")] if command == "report" else []
    assert main([command, str(tmp_path / name), *more]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    as_kept(shown)


def test_a_flight_record_is_no_log(tmp_path, capsys, as_kept):
    assert main(["suspects", write_record(tmp_path / "run.ofr")]) == 2
    as_kept(capsys.readouterr().err)


def test_a_log_whose_version_is_no_number_is_one_sentence(tmp_path, capsys, as_kept):
    assert main(["suspects", write_log(tmp_path / "g.jsonl", schema="x")]) == 2
    as_kept(capsys.readouterr().err)


@pytest.mark.parametrize("place", ["build", "model"])
def test_explain_names_what_it_cannot_use(place, tmp_path, capsys, as_kept):
    (tmp_path / "replay.pt").write_text("{}")
    path = tmp_path / "made.py"
    path.write_text("import torch\nmodel = torch.nn.Linear(2, 2)\nbuild = model.float")
    assert main(["explain", str(tmp_path), "--model", f"{path}:{place}"]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    as_kept(shown)


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    log = write_log(tmp_path / "guard.jsonl")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "overflow_fast", "suspects", log]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


# env


def test_env_has_what_a_bug_report_needs(capsys, monkeypatch):
    import torch

    monkeypatch.setenv("OVERFLOW_FAST_CUDA", "1")
    shown = output_of(capsys, "env")
    assert re.search(r"^kernels: cpu \w+, cuda (True|False), mps ", shown, re.M)
    assert re.search(r"^libraries: .*safetensors \d", shown, re.M)
    assert re.search(r"^variables: .*OVERFLOW_FAST_CUDA 1", shown, re.M)
    assert f"\nPyTorch version: {torch.__version__}\n" in shown
    assert "Python version: " in shown


def test_progress_is_shown_on_a_terminal_alone_and_late(capsys, monkeypatch):
    from overflow_fast.base.text import with_progress

    assert list(with_progress(range(3), "files", None)) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert list(with_progress(range(3), "files", None)) == [0, 1, 2]


# What was asked for, and is not there.


def test_a_missing_file_is_named_without_numbers_of_the_system(
    tmp_path, capsys, as_kept
):
    path = str(tmp_path / "nope.ofr")
    assert main(["report", path, "-o", str(tmp_path / "o.html")]) == 2
    as_kept(capsys.readouterr().err)


@pytest.mark.parametrize("folder", ["nope", "made.py", "evidence"])
def test_explain_says_which_folder_before_it_makes_a_model(
    folder, tmp_path, capsys, as_kept
):
    for number in (3, 4):
        step = tmp_path / f"evidence/run/step-0000000{number}"
        step.mkdir(parents=True)
        (step / "replay.pt").write_text("{}")
    path = tmp_path / "made.py"
    path.write_text("def build():\n    raise AssertionError")
    where = str(tmp_path / folder)
    assert main(["explain", where, "--model", f"{path}:build"]) == 2
    as_kept(capsys.readouterr().err)


def test_a_function_that_takes_arguments_makes_no_model(tmp_path, capsys, as_kept):
    (tmp_path / "replay.pt").write_text("{}")
    path = tmp_path / "made.py"
    path.write_text("def loss(model, batch): ...")
    assert main(["explain", str(tmp_path), "--model", f"{path}:loss"]) == 2
    as_kept(capsys.readouterr().err)
