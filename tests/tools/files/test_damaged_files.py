"""Any damage to a file is a documented error or is said: no traceback, no hang.

`OVERFLOW_FAST_MUTATIONS=5000` damages each format that many times.
"""

import contextlib
import io
import json
import os
import random
import shutil

import pytest
import torch
from guarding import NAN
from mutations import spoil
from page_records import Parsed
from processes import python

import overflow_fast
from overflow_fast import OverflowGuard, RecordError, RecordingError, read_record
from overflow_fast.__main__ import main
from overflow_fast.tools.cli.logged_incidents import LogError, read_incidents
from overflow_fast.tools.cli.suspects_command import suspects_of
from overflow_fast.tools.compare.recorded import read_run
from overflow_fast.tools.page.render import read_sources

TENSORS = "tensors.safetensors"
NUM = int(os.environ.get("OVERFLOW_FAST_MUTATIONS", 60))
MODEL = """
import torch

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
"""


def made_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One valid file or folder of each kind, by the real writers."""
    folder = tmp_path_factory.mktemp("whole")
    model = made_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kept = {"evidence": folder / "evidence", "log": folder / "log.jsonl"}
    with OverflowGuard(
        model, optimizer, "skip", record=folder / "run.ofr", **kept
    ) as guard:
        for value in (1.0, 2.0, NAN, 1.0):
            guard.record(grad_norm=torch.ones(()))
            model(torch.full((2, 4), value)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    (step,) = (folder / "evidence").glob("overflow_fast/*/step-*")
    assert (step / "replay.pt").exists() and (step / "explanation.json").exists()
    shutil.move(step, folder / "step")
    (folder / "model.py").write_text(MODEL)
    for name in ("a", "b"):
        with overflow_fast.recording(folder / name, made_model()) as run:
            x = torch.ones(2, 4) * (1.5 if name == "a" else 1.0)
            run._model(x).sum().backward()
    return folder


def ask(*arguments):
    """The exit status of a command; its output may hold no control character."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([str(each) for each in arguments])
        except SystemExit as error:
            status = error.code
    text = out.getvalue() + err.getvalue()
    assert not any(ord(each) < 32 and each != "\n" for each in text), text
    if status == 2:
        assert text.strip()
    return status


def copied(whole, folder, *names):
    for name in names:
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        (folder / name).unlink(missing_ok=True)
        copy = shutil.copytree if (whole / name).is_dir() else shutil.copy
        copy(whole / name, folder / name)


def mutations(seed):
    return [random.Random(f"{seed} {i}") for i in range(NUM)]


def test_records(whole, tmp_path):
    path, page = tmp_path / "run.ofr", tmp_path / "page.html"
    for i, chance in enumerate(mutations("record")):
        copied(whole, tmp_path, "run.ofr")
        spoil(chance, path)
        with contextlib.suppress(RecordError, OSError):
            record = read_record(path)
            assert len(record.steps) == len(record)
            list(record)
            record.headroom_bits()
            str(record)
        if i % 2 == 0:
            assert ask("report", path, "-o", page) in (0, 2)


def test_logs(whole, tmp_path):
    path = tmp_path / "log.jsonl"
    for chance in mutations("log"):
        copied(whole, tmp_path, "log.jsonl")
        spoil(chance, path)
        assert ask("suspects", path) in (0, 2)
        with contextlib.suppress(LogError):
            str(suspects_of(read_incidents(path)))


def test_evidence(whole, tmp_path):
    for chance in mutations("evidence"):
        copied(whole, tmp_path, "step")
        name = chance.choice(
            ["overflow_fast.json", "report.json", "explanation.json", TENSORS]
        )
        spoil(chance, tmp_path / "step" / name)
        assert ask("report", tmp_path / "step", "-o", tmp_path / "page.html") in (0, 2)


@pytest.mark.slow
def test_saved_steps(whole, tmp_path):
    model = f"{whole / 'model.py'}:build"
    assert ask("explain", whole / "step", "--model", model) == 0
    for chance in mutations("step"):
        copied(whole, tmp_path, "step")
        spoil(chance, tmp_path / "step" / "replay.pt")
        any_weights = ["--any-weights"] * chance.randrange(2)
        step = tmp_path / "step"
        assert ask("explain", step, "--model", model, *any_weights) in (0, 2)


def test_recordings(whole, tmp_path):
    for i, chance in enumerate(mutations("recording")):
        copied(whole, tmp_path, "a")
        spoil(chance, chance.choice(sorted((tmp_path / "a").iterdir())))
        output = tmp_path / f"diff.{('html', 'json')[i % 2]}"
        output.unlink(missing_ok=True)
        with contextlib.suppress(RecordingError):
            str(overflow_fast.compare(whole / "b", tmp_path / "a"))
        assert ask("compare", tmp_path / "a", whole / "b", "-o", output) in range(4)


# One damaged file among several.


def test_a_damaged_rank_is_left_out_of_a_comparison(whole, tmp_path, as_kept):
    copied(whole, tmp_path, "a")
    (tmp_path / "a" / "rank-1.step-0.jsonl").write_text("no recording\n")
    found = overflow_fast.compare(tmp_path / "a", whole / "b")
    assert found.num_compared
    as_kept(found.said)


def test_damaged_evidence_is_said_beside_what_can_be_read(
    whole, tmp_path, capsys, as_kept
):
    for i in range(2):
        shutil.copytree(whole / "step", tmp_path / f"step-{i}")
    (tmp_path / "step-0" / "report.json").write_text("{")
    sources = read_sources([tmp_path])
    assert len(sources.incidents) == 1 and "report.json" in sources.damaged[0]
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0
    as_kept(capsys.readouterr().err)
    as_kept(Parsed((tmp_path / "page.html").read_text()).sections["Coverage"])


# What is no regular file, or larger than memory.


@pytest.mark.parametrize(
    "kind", ["fifo", "folder", "absent", "/dev/zero", "name", "nul", "huge"]
)
def test_what_is_no_file_is_a_sentence(kind, tmp_path, whole):
    path = tmp_path / "x"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "/dev/zero":
        path = kind
    elif kind == "name":
        path = tmp_path / ("n" * 300)
    elif kind == "nul":
        path = tmp_path / "a\0b"
    elif kind == "huge":
        shutil.copy(whole / "run.ofr", path)
        os.truncate(path, 2**36)  # takes no room on the disk
    page = tmp_path / "page.html"
    for command in (
        ("suspects", path),
        ("report", path, "-o", page),
        ("compare", path, path),
        ("explain", path, "--model", f"{whole / 'model.py'}:build"),
        ("explain", whole / "step", "--model", f"{path}:build"),
    ):
        assert ask(*command) == 2, command


CLAIMS = """
import base64, json, resource, sys
import overflow_fast
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30,) * 2)
folder = sys.argv[1]
huge = 10**12
lines = [json.loads(text) for text in open(f"{folder}/run.ofr")]

def read(name, changed):
    with open(f"{folder}/{name}.ofr", "w") as file:
        file.write("".join(json.dumps(line) + "\\n" for line in changed))
    try:
        record = overflow_fast.read_record(f"{folder}/{name}.ofr")
        list(record), record.headroom_bits()
    except overflow_fast.RecordError as error:
        return str(error)
    return f"{record.num_damaged} damaged"

def columns(num):
    return [{**line, "models": [{**each, "num": num} for each in line["models"]]}
            if line["kind"] == "steps" else line for line in lines]

for num in (huge, 2**31 - 1, 10**9):
    assert read("num", columns(num)) == "4 damaged", num
step = lines[-1]
wide = base64.b64encode(bytes(4 * 60_000)).decode()
wide = {**step, "models": [{"num": 60_000, "abs_max": wide}]}
narrow = {**step, "models": [{"num": 0}]}
said = read("wide", [*lines, wide] + [narrow] * 5000)
assert "is damaged" in said, said
with open(f"{folder}/hole.ofr", "wb") as file:
    file.write(json.dumps(lines[0]).encode() + b"\\n")
    file.truncate(2**29)
assert overflow_fast.read_record(f"{folder}/hole.ofr").num_damaged
print("bounded")
"""


def test_memory_is_bounded_by_the_file_whatever_it_claims(whole, tmp_path):
    copied(whole, tmp_path, "run.ofr")
    done = python("-c", CLAIMS, str(tmp_path))
    assert done.stdout == "bounded\n", done.stderr


@pytest.mark.parametrize("change", [{"dtype": "float7"}, {"shape": [2**60] * 60}])
def test_a_dtype_or_shape_that_no_tensor_has_ends_no_comparison(
    change, whole, tmp_path
):
    copied(whole, tmp_path, "a")
    path = tmp_path / "a" / "rank-0.step-0.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    for line in lines[1::2]:
        line.update(change)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for folders in ((tmp_path / "a", whole / "b"), (whole / "b", tmp_path / "a")):
        if "shape" in change:
            with pytest.raises(RecordingError, match="no tensor has the shape"):
                overflow_fast.compare(*folders)
        else:
            assert "against" in str(overflow_fast.compare(*folders))


def test_a_chain_of_shared_tensors_is_followed_once(whole, tmp_path):
    copied(whole, tmp_path, "a")
    path = tmp_path / "a" / "rank-0.step-0.jsonl"
    head, row = (json.loads(text) for text in path.read_text().splitlines()[:2])
    num = 20_000  # many seconds, if each walks down the whole chain
    chain = [{**row, "order": i, "same": i - 1} for i in range(1, num + 1)]
    found = [{**head, "rows": num + 1}, row, *chain]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in found))
    (step,) = read_run(tmp_path / "a").ranks(0)
    assert len(step.rows) == num + 1
    assert all(row.line.same in (None, 0) for row in step.rows)


def test_a_module_within_thousands_is_drawn(whole, tmp_path):
    copied(whole, tmp_path, "step")
    path = tmp_path / "step" / "explanation.json"
    found = json.loads(path.read_text())
    remedy = {"text": "a change", "tried": False, "why": "the replay raised it"}
    deep = {**found, "module": ".".join("a" * 5000), "remedies": [remedy]}
    path.write_text(json.dumps(deep))
    page = tmp_path / "page.html"
    assert ask("report", tmp_path / "step", "-o", page) == 0
    assert remedy["why"] in page.read_text()
