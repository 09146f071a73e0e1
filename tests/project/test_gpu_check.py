"""The check for a machine with a GPU: its own logic, and all of it on the CPU."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import gpu_check
import pytest
from bench_variants import winner
from gpu_check import CUT_OFF, FAILED, NO_TIME, NOT_RUN, PASSED, Stage
from processes import python

ROOT = Path(__file__).parents[2]
PASSES = "print('fine')"
FAILS = "print('error: it broke'); raise SystemExit(3)"


def stage(name, code, *needs, seconds=60, least=0, refusal=None):
    command = [sys.executable, "-c", code]
    return Stage(name, seconds, least, lambda *given: [command], needs, refusal)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the check with stages of the test's own; returns its status and state."""
    facts = {"commit": "c0ffee", "sources": "0", "date": ""}
    monkeypatch.setattr(gpu_check, "collect_facts", lambda device: facts)
    monkeypatch.setattr(gpu_check, "SIGNALS", ())
    # As those of `main()` do: where a shell's background job runs the tests, stages
    # would ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.delenv("OUT", raising=False)

    def run(*listed, arguments=(), device="cpu", **changed):
        monkeypatch.setattr(gpu_check, "STAGES", listed)
        facts.update(changed, device=device)
        status = gpu_check.main(["--out", str(tmp_path / "out"), *arguments])
        (kept,) = (tmp_path / "out").glob("*.json")
        stages = json.loads(kept.read_text())["stages"]
        statuses = {name: one["status"] for name, one in stages.items()}
        return status, statuses, capsys.readouterr().out

    yield run
    signal.signal(signal.SIGINT, before)


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
        "(out / 'part.md').write_text('a table')\n"
        "print('measured', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    status, statuses, said = run(stage("one", code), stage("two", PASSES))
    assert (status, statuses) == (1, {"one": FAILED, "two": PASSED})
    assert "signal 9" in said and "one: 42 GB/s" in said
    whole = json.loads((tmp_path / "out/cpu.json").read_text())
    assert whole["stages"]["one"]["part.json"]["headlines"] == ["42 GB/s"]
    assert "a table" in (tmp_path / "out/cpu.md").read_text()
    assert "measured" in (tmp_path / "out/cpu.log.txt").read_text()


def is_running(pid):
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rsplit(")")[-1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def cut_off(run, tmp_path, monkeypatch):
    """A run whose first stage reaches its limit once it has printed what it should."""
    log = tmp_path / "out/stages/one/log.txt"
    limit = gpu_check.GRACE + 100

    def cut_off(begun, command, *others):
        class Process(subprocess.Popen):
            def wait(self, timeout=None):
                if timeout is None or not limit - 10 < timeout <= limit:
                    return super().wait(timeout)
                while not re.search(begun, log.read_text()):
                    assert self.poll() is None, log.read_text()
                    time.sleep(0.01)
                raise subprocess.TimeoutExpired(self.args, timeout)

        monkeypatch.setattr(subprocess, "Popen", Process)
        first = Stage("one", limit, 0, lambda *given: [command])
        found = run(first, *others, device="cuda", name="GPU of a test")
        return *found, log.read_text()

    return cut_off


def test_a_stage_that_hangs_is_ended_with_all_its_processes(cut_off, tmp_path):
    child = ["sh", "-c", "trap '' INT; sleep 600 & echo $!; wait"]
    code = f"import subprocess; subprocess.run({child})"
    command = [sys.executable, "-c", code]
    two = stage("two", PASSES)
    status, statuses, said, log = cut_off(r"\d\n", command, two)
    assert (status, statuses) == (1, {"one": CUT_OFF, "two": PASSED})
    assert not is_running(int(log.split()[0]))
    assert "--resume goes on" in said
    assert (tmp_path / "out/gpu-gpu-of-a-test.json").exists()


@pytest.mark.slow
def test_tests_that_are_cut_off_say_what_has_failed(cut_off, tmp_path):
    (tmp_path / "test_it.py").write_text(
        "def test_a(): assert 1 == 2\ndef test_b(): import time; time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "pytest", "-v", "-c", os.devnull, str(tmp_path)]
    _, statuses, said, log = cut_off("::test_b", command)
    assert statuses == {"one": CUT_OFF}
    assert "assert 1 == 2" in log
    assert re.search(r"last: \S+::test_b", said)
    assert re.search(r"\n +\S+::test_a FAILED", said)


def test_a_stage_for_which_time_is_short_is_skipped_with_a_word(run):
    status, statuses, said = run(stage("one", PASSES, least=9000), stage("two", PASSES))
    assert (status, statuses) == (0, {"one": NO_TIME, "two": PASSED})
    assert "9000 needed" in said and "--resume goes on" in said


def test_a_stage_that_cannot_work_here_is_skipped_with_its_reason(run):
    code = "print('skipped: there is no nvcc'); raise SystemExit(77)"
    refused = "print('Device not supported'); raise SystemExit(1)"
    status, statuses, said = run(
        stage("one", code), stage("two", refused, refusal="not supported")
    )
    assert (status, statuses) == (0, {"one": NOT_RUN, "two": NOT_RUN})
    assert "there is no nvcc" in said and "Device not supported" in said


def test_resuming_repeats_only_what_has_not_passed(run, tmp_path):
    counter = tmp_path / "count"
    counts = f"open({str(counter)!r}, 'a').write('x')"
    listed = stage("one", counts), stage("two", PASSES, least=9000)
    run(*listed)
    _, statuses, said = run(listed[0], stage("two", PASSES), arguments=["--resume"])
    assert statuses == {"one": PASSED, "two": PASSED}
    assert counter.read_text() == "x" and "earlier" in said
    _, _, said = run(*listed, arguments=["--resume"], sources="1")
    assert counter.read_text() == "xx" and "nothing is resumed" in said


def test_resuming_runs_again_what_failed_but_last(run):
    run(stage("zero", PASSES), stage("one", FAILS, "zero"), stage("two", PASSES))
    listed = stage("zero", PASSES), stage("one", PASSES, "zero"), stage("two", FAILS)
    run(*listed, arguments=["--resume", "--only", "zero", "two"])
    listed = (*listed[:2], stage("two", PASSES), stage("three", PASSES))
    _, statuses, said = run(*listed, arguments=["--resume"])
    assert set(statuses.values()) == {PASSED}
    assert said.index("== three") < said.index("== one")


def test_results_are_in_the_folder_that_out_names_while_later_stages_run(
    run, tmp_path, monkeypatch
):
    copies = tmp_path / "copies"
    copies.mkdir()
    monkeypatch.setenv("OUT", str(copies))
    run(stage("one", PASSES), stage("two", f"print(open('{copies}/cpu.md').read())"))
    assert {path.name for path in copies.iterdir()} == {
        *("cpu.json", "cpu.md", "cpu.log.txt")
    }
    log = (tmp_path / "out/stages/two/log.txt").read_text()
    assert "passed   one" in log and "running  two" in log


def test_a_signal_ends_the_stage_and_the_summary_is_written(tmp_path):
    fifo = tmp_path / "begun"
    os.mkfifo(fifo)
    hangs = f"open({str(fifo)!r}, 'w').close(); import time; time.sleep(600)"
    code = (
        "import sys, gpu_check\n"
        f"commands = lambda *given: [[sys.executable, '-c', {hangs!r}]]\n"
        "gpu_check.STAGES = (gpu_check.Stage('one', 600, 0, commands),)\n"
        "facts = dict(commit='c', sources='0', date='', device='cpu')\n"
        "gpu_check.collect_facts = lambda device: facts\n"
        f"sys.exit(gpu_check.main(['--out', {str(tmp_path)!r}]))"
    )
    check = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")},
        stdout=subprocess.PIPE,
        text=True,
    )
    fifo.open().close()  # waits until the stage opens it
    check.send_signal(signal.SIGTERM)
    said, _ = check.communicate()
    assert check.returncode == 130
    assert "CUT OFF  one" in said and "by SIGTERM" in said
    assert (tmp_path / "cpu.json").exists()


def test_the_summary_has_at_most_sixty_lines(run):
    code = (
        "import json, os\n"
        "part = {'headlines': [f'figure {i} ' + 'x' * 300 for i in range(40)]}\n"
        "json.dump(part, open(os.environ['CHECK_OUT'] + '/part.json', 'w'))\n"
        "print('error: x\\n' * 9); raise SystemExit(1)"
    )
    names = [each.name for each in gpu_check.STAGES]
    _, _, said = run(*(stage(name, code) for name in names))
    lines = said[said.index("commit c0ffee") :].splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 150
    assert "more lines" in lines[-2] and lines[-1].startswith("FAILED: kernel")
    for name in names:
        assert any(line.startswith(f"FAILED   {name}") for line in lines)


def test_a_checkout_that_cannot_be_written_to_is_copied(tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"
    (checkout / "overflow_fast").mkdir(parents=True)
    (checkout / "overflow_fast/__init__.py").write_text("here = 1\n")
    (checkout / ".git").mkdir()
    (checkout / "overflow_fast").chmod(0o500)
    begun = []
    monkeypatch.setenv("COMMIT", "c0ffee")
    monkeypatch.setattr(gpu_check, "ROOT", checkout)
    monkeypatch.setattr(gpu_check.os, "access", lambda path, mode: False)
    monkeypatch.setattr(gpu_check.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(gpu_check.os, "execv", lambda *given: begun.append(given))
    gpu_check.move_elsewhere()
    (_, command) = begun[0]
    tree = Path(command[1]).parents[1]
    assert tree != checkout and (tree / "overflow_fast/__init__.py").exists()
    assert not (tree / ".git").exists()
    assert os.stat(tree / "overflow_fast").st_mode & 0o200


@pytest.mark.slow
def test_tests_whose_packages_are_missing_are_skipped_and_named(tmp_path):
    (tmp_path / "conftest.py").symlink_to(ROOT / "tests/conftest.py")
    (tmp_path / "test_a.py").write_text("import no_such_package\n")
    (tmp_path / "test_b.py").write_text(
        "def test_it(): import no_such_library.part\n"
        "def test_of_ours(): import overflow_fast.no_such_part\n"
    )
    options = ["-rs", "--skip-missing", "-c", str(ROOT / "pyproject.toml")]
    options += ["--rootdir", str(tmp_path), str(tmp_path)]
    done = python("-m", "pytest", *options, cwd=tmp_path)
    assert "no_such_package is missing" in done.stdout
    assert "no_such_library is missing" in done.stdout
    assert "1 failed, 2 skipped" in done.stdout


def test_a_decision_goes_to_what_is_better_by_its_margin():
    assert winner(("a", "b"), {"a": 10.0, "b": 9.8}, 0.03) == "a"
    assert winner(("a", "b"), {"a": 10.0, "b": 9.6}, 0.03) == "b"
    assert winner(("a", "b"), {"a": 10.0, "b": 10.0}, 0.0) == "a"
    assert winner(("a", "b"), {"b": 1.0}, 0.0) == "a"


@pytest.mark.slow
def test_the_check_runs_on_the_cpu(tmp_path, monkeypatch, capsys):
    def forked(command, log, seconds, env):
        """Runs a command of Python in a fork, which has imported torch."""
        done = python(*command[1:], cwd=ROOT, environment=os.environ | env)
        log.write_text(done.stdout + done.stderr)
        return done.returncode

    monkeypatch.setattr(gpu_check, "run", forked)
    monkeypatch.setattr(gpu_check, "SIGNALS", ())
    monkeypatch.setenv("OUT", "")
    chosen = ["--device", "cpu", "--quick", "--only", "gpu-tests", "hooks", "sanitizer"]
    status = gpu_check.main([*chosen, "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert status == 0, said
    assert "ns a module" in said
    result = json.loads((tmp_path / "cpu.json").read_text())
    assert result["facts"]["commit"] and result["facts"]["sources"]
    stages = result["stages"]
    assert stages["hooks"]["hooks.json"]["is_complete"]
    assert stages["hooks"]["hooks.json"]["machine"]["commit"]
    assert stages["gpu-tests"]["status"] == PASSED
    assert stages["sanitizer"]["status"] == NOT_RUN


def test_help_of_a_benchmark_measures_nothing():
    done = python(str(ROOT / "benchmarks/bench_scan.py"), "--help")
    assert done.returncode == 0, done.stderr
    assert "the scan against a plain read" in done.stdout and "--quick" in done.stdout
    assert not done.stderr
