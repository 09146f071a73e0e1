"""The log: a header for each run, a line for each step, JSON that any reader takes."""

import json
import os
import platform
import shutil

import pytest
import torch
from evidence_folders import no_file_beyond
from guarding import INF, NAN, batches, make, plant, train, train_step
from processes import context
from torch import nn

import overflow_fast
from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.guard.files.json_text import dumps
from overflow_fast.guard.report.json_log import JsonLog
from overflow_fast.options import Log, Schedule


def all_lines_of(path):
    """The view of a reader that takes JSON alone."""
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(each, parse_constant=pytest.fail) for each in text.splitlines()]


def lines_of(path):
    """The lines of steps."""
    return [line for line in all_lines_of(path) if line["kind"] == "step"]


def test_the_log_has_a_line_for_each_step(model, optimizer, tmp_path):
    path = tmp_path / "new" / "guard.jsonl"
    with OverflowGuard(model, optimizer, "skip", log=path):
        for i, batch in enumerate(batches(3)):
            with plant(model.head, INF) if i == 1 else torch.enable_grad():
                train_step(model, optimizer, batch)
    lines = lines_of(path)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [line["is_clean"] for line in lines] == [True, False, True]
    assert [line["action"] for line in lines] == [None, "skip", None]
    assert [line["num_skipped"] for line in lines] == [0, 1, 1]
    assert lines[1]["first"] == "head: output"
    assert lines[1]["maker"] == "head"
    bits = [line["headroom_bits"] for line in lines if line["is_clean"]]
    assert all(100 < each < 140 for each in bits)
    assert {line["headroom_bits"] for line in lines if not line["is_clean"]} == {0}
    assert lines[0]["headroom_at"]


def test_the_log_has_a_line_for_each_request(tmp_path):
    net, path = nn.Linear(2, 2), tmp_path / "guard.jsonl"
    options = {"log": path, "schedule": Schedule(every=2)}
    with OverflowGuard(net, on_overflow="warn", **options) as guard, torch.no_grad():
        for i in range(5):
            with guard.request():
                net(torch.full((1, 2), NAN if i == 2 else 1.0))
        with pytest.raises(KeyError), guard.request():
            net(torch.ones(1, 2))
            raise KeyError("own")  # judged only where it is bad
    lines = lines_of(path)
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert [line["is_clean"] for line in lines] == [True, False, True]
    assert [line["action"] for line in lines] == [None, "warn", None]
    assert [line["num_left_out"] for line in lines] == [0, 1, 2]


def test_the_line_of_a_request_leaves_that_of_a_round_to_its_end(tmp_path):
    net, path = nn.Linear(2, 2), tmp_path / "guard.jsonl"
    both = [torch.optim.SGD([each], lr=1e-3) for each in net.parameters()]
    with OverflowGuard(net, both, "warn", log=path) as guard:
        net(torch.ones(1, 2)).sum().backward()
        both[0].step()
        with torch.no_grad(), guard.request():
            net(torch.full((1, 2), NAN))
        both[1].step()
    assert [line["is_clean"] for line in lines_of(path)] == [False, True]


def test_the_least_headroom_is_that_of_half_precision(model, tmp_path):
    model.bfloat16()
    model.head.half()
    model.head.register_forward_pre_hook(lambda m, args: (args[0].half(),))
    model.head.weight.data.fill_(3e4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    path = tmp_path / "guard.jsonl"
    with OverflowGuard(model, optimizer, log=path, watch=("weights",)):
        optimizer.step()
    (line,) = lines_of(path)
    assert line["headroom_at"] == "head.weight"
    assert line["headroom_bits"] == pytest.approx(1.13, abs=0.01)  # 65504 / 30000
    assert all_lines_of(path)[0]["dtypes"] == ["bfloat16", "float16"]


def test_a_run_begins_with_a_header(tmp_path):
    path = tmp_path / "guard.jsonl"
    for policy in ("skip", lambda report: "skip"):
        model, optimizer = make()
        with OverflowGuard(model, optimizer, policy, log=path):
            train(model, optimizer, batches(2))
    lines = all_lines_of(path)
    assert [line["kind"] for line in lines] == ["run", "step", "step"] * 2
    first, second = lines[0], lines[3]
    assert first["schema"] == second["schema"] == 1
    assert first["run"] != second["run"]
    assert [line["run"] for line in lines[1:3]] == [first["run"]] * 2
    assert [line["run"] for line in lines[4:]] == [second["run"]] * 2
    assert (first["rank"], first["world_size"]) == (0, 1)
    assert first["overflow_fast"] == overflow_fast.__version__
    assert first["torch"] == torch.__version__
    assert first["python"] == platform.python_version()
    assert first["dtypes"] == ["float32"] and first["models"] == ["Net"]
    assert (first["policy"], second["policy"]) == ("skip", "callable")
    assert first["pid"] == os.getpid() and first["host"]
    assert first["time"] <= lines[1]["time"]
    assert first["started"].endswith("Z")


def silent(value):
    """A model without weights to speak of, given a value."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    return model, torch.full((1, 2), value)


@pytest.mark.parametrize("value", [INF, -INF, NAN, 0.0])
def test_no_number_is_written_that_json_does_not_know(tmp_path, value):
    path = tmp_path / "guard.jsonl"
    model, x = silent(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    asked = {"log": path, "evidence": tmp_path, "watch": ["activations"]}
    with OverflowGuard(model, optimizer, "warn", **asked) as guard:
        for each in (torch.zeros(1, 2), x):  # nothing but zeros: inf bits are left
            model(each).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    lines = lines_of(path)
    assert lines[0]["headroom_bits"] == "inf"
    report = guard.last_report
    assert (report is None) == (value == 0)
    for saved in tmp_path.glob("overflow_fast/*/*/report.json"):
        json.loads(saved.read_text(), parse_constant=pytest.fail)
    if report is not None:
        plain = json.loads(report.to_json(), parse_constant=pytest.fail)
        assert plain == report.to_dict()
        json.dumps(report.to_dict(), allow_nan=False)


def test_what_is_not_finite_is_a_string(as_kept):
    as_kept(dumps({"a": [INF, -INF, NAN, 1.5, True, None], 2: ("x", {"b": INF})}))
    json.loads(dumps({"a path": "\udcff", "size": torch.Size([2])})).keys()


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_root_has_a_name(tmp_path, wrapped):
    path = tmp_path / "guard.jsonl"
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    models = {"net": model} if wrapped else model
    with OverflowGuard(models, optimizer, "warn", log=path) as guard:
        model(torch.full((1, 2), INF)).sum().backward()
        optimizer.step()
    (line,) = lines_of(path)
    name = "net" if wrapped else "the model"
    assert line["first"] == f"{name}: input[0]"
    assert line["headroom_at"] == name
    assert guard.last_report.to_dict()["verdict"]["first"]["place"] == name
    assert f"`input[0]` of {name} (Linear)" in str(guard.last_report)


def test_pandas_reads_it(tmp_path):
    pandas = pytest.importorskip("pandas")
    path = tmp_path / "guard.jsonl"
    model, x = silent(INF)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    asked = {"log": path, "watch": ["activations"]}
    with OverflowGuard(model, optimizer, "skip", **asked) as guard:
        for each in (torch.zeros(1, 2), x, torch.zeros(1, 2)):
            model(each).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    frame = pandas.read_json(path, lines=True)
    steps = frame[frame.kind == "step"]
    assert list(steps.step) == [0, 1, 2]
    assert list(steps.run.unique()) == [frame.run[0]]
    assert list(steps.headroom_bits.astype(float)) == [INF, 0.0, INF]
    assert list(steps.is_clean.astype(bool)) == [True, False, True]
    report = pandas.json_normalize(guard.last_report.to_dict())
    assert report["verdict.first.place"][0] == "the model"


# Rotation.


def run_of(path, steps, **arguments):
    model, optimizer = make()
    with OverflowGuard(model, optimizer, log=Log(path, **arguments)):
        train(model, optimizer, batches(steps))


SMALL = {"mib": 1500 / 2**20}


def test_the_log_is_rotated(tmp_path):
    path = tmp_path / "guard.jsonl"
    run_of(path, 30, keep=2, **SMALL)
    names = sorted(each.name for each in tmp_path.iterdir())
    assert names == ["guard.jsonl", "guard.jsonl.1", "guard.jsonl.2"]
    assert all(each.stat().st_size <= 1500 for each in tmp_path.iterdir())
    assert lines_of(path)[-1]["step"] == 29
    steps = []
    for name in reversed(names):
        first, *lines = all_lines_of(tmp_path / name)
        assert first["kind"] == "run" and {each["kind"] for each in lines} == {"step"}
        steps += [line["step"] for line in lines]
    assert steps == list(range(steps[0], 30))


def test_with_nothing_to_keep_it_grows(tmp_path):
    run_of(tmp_path / "guard.jsonl", 20, keep=0, **SMALL)
    assert [each.name for each in tmp_path.iterdir()] == ["guard.jsonl"]
    assert len(lines_of(tmp_path / "guard.jsonl")) == 20


def test_the_log_is_written_through_a_link(tmp_path):
    (tmp_path / "target.jsonl").write_text("")
    (tmp_path / "guard.jsonl").symlink_to(tmp_path / "target.jsonl")
    run_of(tmp_path / "guard.jsonl", 20, **SMALL)
    assert (tmp_path / "guard.jsonl").is_symlink()
    assert (tmp_path / "target.jsonl.1").is_file()
    assert lines_of(tmp_path / "guard.jsonl")[-1]["step"] == 19


@pytest.mark.parametrize("name", ["guard.jsonl.1", "guard.jsonl.3"])
@pytest.mark.parametrize("text", ["mine", '{"loss": 1}\n', "[1]\n", "\n", "\x00\xff"])
def test_older_files_that_are_no_logs_are_left_alone(
    tmp_path, caplog, name, text, as_kept
):
    (tmp_path / name).write_text(text)
    run_of(tmp_path / "guard.jsonl", 20, **SMALL)
    assert (tmp_path / name).read_text() == text
    assert len(list(tmp_path.iterdir())) == 2
    assert len(lines_of(tmp_path / "guard.jsonl")) == 20
    as_kept(caplog.messages)


def test_a_file_that_is_no_log_is_left_alone(tmp_path, caplog, as_kept):
    path = tmp_path / "train.jsonl"
    path.write_text('{"loss": 1.5}\n')
    run_of(path, 2)
    assert path.read_text() == '{"loss": 1.5}\n'
    (other,) = (each for each in tmp_path.iterdir() if each != path)
    assert other.name.startswith("train.2") and other.suffix == ".jsonl"
    assert len(lines_of(other)) == 2
    as_kept(caplog.messages)


# Other writers.


def log_of(path, name, max_bytes=10**9, num_files=3):
    header = {"kind": "run", "overflow_fast": "", "run": name}
    return JsonLog(path, name, lambda: header, max_bytes, num_files)


def test_two_writers_share_a_file(tmp_path):
    path = tmp_path / "guard.jsonl"
    logs = {name: log_of(path, name, max_bytes=1000) for name in ("a", "b")}
    for i in range(40):
        for name, log in logs.items():
            log.write({"kind": "step", "run": name, "step": i})
    seen = {"a": [], "b": []}
    for file in (*(path.with_name(f"guard.jsonl.{i}") for i in (3, 2, 1)), path):
        begun = set()
        for line in all_lines_of(file):
            begun |= {line["run"]} if line["kind"] == "run" else set()
            assert line["run"] in begun  # behind its header, in each file
            seen[line["run"]] += [line["step"]] if line["kind"] == "step" else []
    for steps in seen.values():
        assert steps == list(range(steps[0], 40)) and len(steps) > 20


def write_200_lines(name, path, are_both_there):
    are_both_there.wait()
    log = log_of(path, name, max_bytes=200_000, num_files=50)
    for step in range(200):
        text = "x" * (step * 50)
        log.write({"kind": "step", "run": name, "step": step, "text": text})


@pytest.mark.slow
def test_two_processes_share_a_file(tmp_path):
    path = tmp_path / "guard.jsonl"
    are_both_there = context().Barrier(2)
    writers = [
        context().Process(target=write_200_lines, args=(name, path, are_both_there))
        for name in "ab"
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    lines = [line for file in tmp_path.iterdir() for line in all_lines_of(file)]
    steps = [(line["run"], line["step"]) for line in lines if line["kind"] == "step"]
    assert sorted(steps) == [(name, step) for name in "ab" for step in range(200)]
    assert len(list(tmp_path.iterdir())) > 5


def test_another_process_may_hold_the_file(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / "guard.jsonl"
    log = log_of(path, "a", max_bytes=100)
    log.write({"kind": "step"})
    with open(path) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for _ in range(9):
            log.write({"kind": "step"})
    assert len(lines_of(path)) == 10
    log.write({"kind": "step"})
    assert len(lines_of(path)) == 1


# What goes wrong.


def test_half_a_line_of_another_process_is_ended(tmp_path):
    path = tmp_path / "guard.jsonl"
    log_of(path, "a").write({"kind": "step"})
    with open(path, "a") as file:
        file.write('{"kind": "st')
    log_of(path, "b").write({"kind": "step"})
    text = path.read_text().splitlines()
    assert text[2] == '{"kind": "st' and json.loads(text[3])["run"] == "b"


def test_a_full_disk_leaves_whole_lines_and_is_said_once(tmp_path, caplog):
    path = tmp_path / "guard.jsonl"
    model, optimizer = make()
    with OverflowGuard(model, optimizer, log=path) as guard:
        with no_file_beyond(800):
            train(model, optimizer, batches(6))
        full = path.read_text()
        train(model, optimizer, batches(1))
        assert guard.step == 7 and guard.coverage().failures == 0
    assert full.endswith("\n") and len(full) <= 800
    assert caplog.text.count("are lost") == 1
    steps = [line["step"] for line in lines_of(path)]
    assert steps[0] == 0 and steps[-1] == 6 and len(steps) < 7


@pytest.mark.parametrize("is_file", [False, True])
def test_a_path_that_cannot_be_a_file_is_said_at_once(tmp_path, caplog, is_file):
    (tmp_path / "there").write_text("mine") if is_file else (tmp_path / "there").mkdir()
    path = tmp_path / "there" / "guard.jsonl" if is_file else tmp_path / "there"
    model, optimizer = make()
    with OverflowGuard(model, optimizer, log=path) as guard:
        train(model, optimizer, batches(3))
        assert guard.step == 3
    said, lost = caplog.messages
    assert "cannot be written" in said and "are lost" in lost
    assert not is_file or (tmp_path / "there").read_text() == "mine"


def test_a_disk_that_fills_behind_a_path_that_became_good_is_said(tmp_path, caplog):
    blocked = tmp_path / "there"
    blocked.write_text("")
    model, optimizer = make()
    with OverflowGuard(model, optimizer, log=blocked / "guard.jsonl"):
        train(model, optimizer, batches(2))
        blocked.unlink()
        train(model, optimizer, batches(1))
        with no_file_beyond((blocked / "guard.jsonl").stat().st_size):
            train(model, optimizer, batches(2))
    told, lost = caplog.messages
    assert "cannot be written" in told and "are lost" in lost


def test_a_folder_that_is_removed_meanwhile_is_made_again(tmp_path, caplog):
    path = tmp_path / "logs" / "guard.jsonl"
    model, optimizer = make()
    with OverflowGuard(model, optimizer, log=path):
        for batch in batches(3):
            shutil.rmtree(path.parent, ignore_errors=True)
            train_step(model, optimizer, batch)
    assert [line["kind"] for line in all_lines_of(path)] == ["run", "step"]
    assert not caplog.text


def test_what_is_no_plain_file_is_written_to(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    run_of(path, 2, mib=1 / 2**20)
    lines = os.read(reader, 2**16).decode().splitlines()
    os.close(reader)
    assert [json.loads(line)["kind"] for line in lines] == ["run", "step", "step"]


def test_the_line_of_a_step_that_raises_is_there(model, optimizer, tmp_path):
    path = tmp_path / "guard.jsonl"
    with OverflowGuard(model, optimizer, log=path):
        with plant(model.head, INF), pytest.raises(NonFiniteError):
            train_step(model, optimizer, batches(1)[0])
    assert [line["action"] for line in lines_of(path)] == ["raise"]
