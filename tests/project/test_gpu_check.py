"""The check for a machine with a GPU: its own logic, and all of it on the CPU."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from check import command, process, record, report, stages, state, testing, tools
from check.stages import Stage
from check.state import CUT_OFF, FAILED, NOT_RUN, PASSED

ROOT = Path(__file__).parents[2]
PASSES = "print('fine')"
FAILS = "print('error: it broke'); raise SystemExit(3)"


def stage(name, code, *needs, seconds=60, least=0.0):
    return Stage(name, f"does {name}", seconds, least, (("-c", code),), needs)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the check with stages of the test's own; returns its status and state."""
    facts = {"commit": "c0ffee", "sources": "0", "date": "", "device": "cpu"}
    monkeypatch.setattr(record, "facts", lambda device: facts | {"device": device})
    monkeypatch.setattr(process, "raise_on_signals", lambda: None)

    def run(*listed, arguments=(), changed=None):
        names = tuple(each.name for each in listed)
        for module in (command, report, state, stages):
            for name, value in {"STAGES": listed, "NAMES": names}.items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, value)
        facts.update(changed or {})
        given = ["--device", "cpu", "--out", str(tmp_path / "out"), *arguments]
        status = command.main(given)
        kept = json.loads((tmp_path / "out/state.json").read_text())
        statuses = {name: one["status"] for name, one in kept["stages"].items()}
        return status, statuses, capsys.readouterr().out

    return run


def test_a_stage_that_fails_stops_only_what_needs_it(run):
    status, statuses, said = run(
        stage("one", FAILS), stage("two", PASSES, "one"), stage("three", PASSES)
    )
    assert status == 1
    assert statuses == {"one": FAILED, "two": NOT_RUN, "three": PASSED}
    assert "error: it broke" in said and "one: FAILED" in said


def test_a_stage_that_dies_leaves_what_it_had(run, tmp_path):
    code = (
        "import os, pathlib, signal\n"
        "out = pathlib.Path(os.environ['CHECK_OUT'])\n"
        "(out / 'part.json').write_text('{\"headlines\": [\"42 GB/s\"]}')\n"
        "print('measured', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    status, statuses, said = run(stage("one", code), stage("two", PASSES))
    assert (status, statuses) == (1, {"one": FAILED, "two": PASSED})
    assert "signal 9" in said and "one: 42 GB/s" in said
    whole = json.loads((tmp_path / "out/cpu.json").read_text())
    assert whole["stages"]["one"]["part.json"]["headlines"] == ["42 GB/s"]
    assert "measured" in (tmp_path / "out/cpu.log.txt").read_text()


def is_running(pid):
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rsplit(")")[-1].split()[0] != "Z"
    except OSError:
        return False


def test_a_stage_that_hangs_is_ended_with_all_its_processes(run, tmp_path):
    child = (
        "import subprocess\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)\n"
    )
    child += "import time; time.sleep(600)"
    status, statuses, said = run(stage("one", child, seconds=1), stage("two", PASSES))
    assert (status, statuses) == (1, {"one": CUT_OFF, "two": PASSED})
    log = (tmp_path / "out/stages/one/log.txt").read_text()
    pid = re.search(r"^\d+$", log, re.M)
    assert pid is None or not is_running(int(pid[0]))
    assert "not everything was run" in said


def test_a_stage_for_which_time_is_short_is_skipped_with_a_word(run):
    status, statuses, said = run(stage("one", PASSES, least=9000), stage("two", PASSES))
    assert (status, statuses) == (0, {"one": NOT_RUN, "two": PASSED})
    assert "9000 needed" in said and "--resume goes on" in said


def test_a_stage_that_cannot_work_here_is_skipped_with_its_reason(run):
    code = "print('skipped: there is no nvcc'); raise SystemExit(77)"
    status, statuses, said = run(stage("one", code))
    assert (status, statuses) == (0, {"one": NOT_RUN})
    assert "there is no nvcc" in said


def test_resuming_repeats_only_what_has_not_passed(run, tmp_path):
    counter = tmp_path / "count"
    counts = f"open({str(counter)!r}, 'a').write('x')"
    listed = stage("one", counts), stage("two", PASSES, least=9000)
    run(*listed)
    _, statuses, said = run(listed[0], stage("two", PASSES), arguments=["--resume"])
    assert statuses == {"one": PASSED, "two": PASSED}
    assert counter.read_text() == "x" and "earlier" in said
    _, _, said = run(*listed, arguments=["--resume"], changed={"sources": "1"})
    assert counter.read_text() == "xx" and "nothing is resumed" in said


def test_resuming_runs_again_what_failed_but_last(run):
    run(stage("one", FAILS), stage("two", PASSES, least=9000))
    _, statuses, said = run(
        stage("one", PASSES), stage("two", PASSES), arguments=["--resume"]
    )
    assert statuses == {"one": PASSED, "two": PASSED}
    assert said.index("== two") < said.index("== one")


def test_an_unknown_stage_is_refused_with_the_names_there_are(capsys):
    with pytest.raises(SystemExit):
        command.parse(["--only", "scan,hook"])
    said = capsys.readouterr().err
    assert "there is no stage 'hook'" in said and "kernel, build, gpu-tests" in said


def test_a_signal_ends_the_stage_and_the_summary_is_written(tmp_path):
    fifo = tmp_path / "begun"
    os.mkfifo(fifo)
    hangs = f"open({str(fifo)!r}, 'w').close(); import time; time.sleep(600)"
    code = (
        "import sys\n"
        "from check import command, record, report, stages, state\n"
        f"listed = (stages.Stage('one', '', 600, 0, (('-c', {hangs!r}),)),)\n"
        "for module in (report, state): module.STAGES = listed\n"
        "report.NAMES = ('one',)\n"
        "facts = dict(commit='c', sources='0', date='', device='cpu')\n"
        "record.facts = lambda device: facts\n"
        f"sys.exit(command.main(['--device', 'cpu', '--out', {str(tmp_path)!r}]))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")}
    check = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    fifo.open().close()  # waits until the stage opens it
    check.send_signal(signal.SIGTERM)
    said, _ = check.communicate()
    assert check.returncode == 130
    assert "CUT OFF  one" in said and "by SIGTERM" in said
    assert (tmp_path / "cpu.json").exists()


def test_the_summary_has_at_most_sixty_lines(tmp_path):
    facts = {"commit": "c", "sources": "0", "date": "", "device": "cuda"}
    kept = state.State(tmp_path, facts, False)
    for name in stages.NAMES:
        kept.folder(name).mkdir(parents=True)
        headlines = {"headlines": [f"figure {i} {'x' * 300}" for i in range(40)]}
        (kept.folder(name) / "part.json").write_text(json.dumps(headlines))
        kept.set(name, state.Result(FAILED, "exit status 1", 1.0, ["error: x"] * 9))
    lines = report.summary(kept)
    assert len(lines) <= 60 and max(map(len, lines)) <= 150
    assert "more lines" in lines[-2] and lines[-1].startswith("FAILED: kernel")
    for name in stages.NAMES:
        assert any(line.startswith(f"FAILED   {name}") for line in lines)


def test_a_checkout_that_cannot_be_written_to_is_copied(tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"
    (checkout / "overflow_fast").mkdir(parents=True)
    (checkout / "overflow_fast/__init__.py").write_text("here = 1\n")
    (checkout / ".git").mkdir()
    monkeypatch.setattr(record, "ROOT", checkout)
    monkeypatch.setattr(command, "is_writable", lambda folder: False)
    monkeypatch.setattr(command.tempfile, "gettempdir", lambda: str(tmp_path))
    tree = command.working_tree()
    assert tree != checkout and (tree / "overflow_fast/__init__.py").exists()
    assert not (tree / ".git").exists()


def test_test_files_whose_packages_are_missing_are_named_and_left_out(monkeypatch):
    found = testing.importlib.util.find_spec
    absent = {"hypothesis", "transformers", "xdist"}
    monkeypatch.setattr(
        testing.importlib.util,
        "find_spec",
        lambda name: None if name in absent else found(name),
    )
    arguments, lacking = testing.command("others", "cpu", False)
    assert "--ignore=tests/scan/test_scan_properties.py" in arguments
    assert "test_scan_properties.py is left out: hypothesis is missing" in lacking
    assert not any("test_gpu_check" in argument for argument in arguments)
    assert "-n" not in arguments and "one after the other" in lacking[-1]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("9.0", "arch=compute_90,code=sm_90"),
        ("12.1", "arch=compute_100,code=compute_100"),
        (None, "arch=compute_80,code=[sm_80,compute_80]"),
    ],
)
def test_nvcc_is_asked_for_what_it_knows(monkeypatch, found, expected):
    listed = "compute_75\ncompute_80\ncompute_90\ncompute_100"
    monkeypatch.setattr(tools, "said", lambda command: listed)
    assert tools.targets("nvcc", found)[-1] == expected


def test_a_decision_goes_to_what_is_better_by_its_margin():
    from bench_variants import winner

    assert winner(("a", "b"), {"a": 10.0, "b": 9.8}, 0.03) == "a"
    assert winner(("a", "b"), {"a": 10.0, "b": 9.6}, 0.03) == "b"
    assert winner(("a", "b"), {"a": 10.0, "b": 10.0}, 0.0) == "a"
    assert winner(("a", "b"), {"b": 1.0}, 0.0) == "a"


@pytest.mark.slow
def test_the_check_runs_on_the_cpu(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "benchmarks/check", "--device", "cpu", "--quick"),
            *("--only", "kernel,hooks,sanitizer", "--out", str(tmp_path)),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OUT": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "PASS: " in done.stdout and "ns a module" in done.stdout
    result = json.loads((tmp_path / "cpu.json").read_text())
    assert result["facts"]["commit"] and result["facts"]["sources"]
    hooks, kernel = (
        result["stages"][name][f"{name}.json"] for name in ("hooks", "kernel")
    )
    assert hooks["is_complete"] and hooks["machine"]["commit"] == kernel["commit"]
    assert result["stages"]["sanitizer"]["status"] == NOT_RUN
