"""python -m overflow_fast, as a user calls it."""

import shlex
import sys

import pytest
import torch
from processes import python

from overflow_fast import __version__
from overflow_fast.__main__ import main
from overflow_fast.guard.config import GuardConfig
from overflow_fast.guard.options import options_of
from overflow_fast.monitors import LayerAudit, Spikes
from overflow_fast.options import Evidence, Explain, Log, Record, Schedule
from overflow_fast.tools.cli.command_line import make_parser
from overflow_fast.tools.cli.guard_options import guard_arguments

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

SCRIPT = """
import sys
print(__name__, sys.argv[1:])
import neighbour
sys.exit(int(sys.argv[1]))
"""


def commands():
    """The parser of each command."""
    found = make_parser()._subparsers._group_actions[0].choices
    for parser in found.values():
        parser.complete()
    return found


def command(*arguments, cwd=None):
    return python("-m", "overflow_fast", *arguments, cwd=cwd)


@pytest.fixture
def script(tmp_path):
    (tmp_path / "neighbour.py").write_text("print('found the neighbour')")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_runs_a_script_as_python_would(script, as_kept):
    done = command("run", str(script), "3", "--lr", "3e-4")
    assert done.returncode == 3
    as_kept(done.stdout.splitlines())


@pytest.mark.parametrize("own", [["--help"], ["--lr", "3", "--", "-m", "--config"]])
def test_what_stands_behind_a_script_is_its_own(tmp_path, own):
    path = tmp_path / "train.py"
    path.write_text("import sys; print(sys.argv[1:])")
    assert command("run", "--every", "2", str(path), *own).stdout == f"{own}\n"


def test_runs_a_module_as_python_would(script):
    done = command("run", "-m", "train", "0", cwd=script.parent)
    assert done.returncode == 0, done.stderr
    assert "__main__ ['0']" in done.stdout


def test_a_traceback_comes_through(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("1 / 0")
    done = command("run", str(path))
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    "arguments, status",
    [(("none.py",), 2), (("folder",), 2), (("-m", "none"), 1), (("-m", "folder"), 1)],
)
def test_a_program_that_is_not_there_is_one_sentence(
    tmp_path, arguments, status, as_kept
):
    (tmp_path / "folder").mkdir()
    done = command("run", *arguments, cwd=tmp_path)
    assert done.returncode == status
    assert done.stderr.count("\n") == 1
    as_kept(done.stderr)


WHERE = "import os, sys; os.chdir('/'); print(__file__, sys.argv[0])"


def test_a_script_has_an_absolute_file_and_its_name_as_given(tmp_path):
    (tmp_path / "train.py").write_text(WHERE)
    done = command("run", "train.py", cwd=tmp_path)
    assert done.stdout == f"{tmp_path / 'train.py'} train.py\n", done.stderr


@pytest.mark.parametrize("name", commands())
def test_the_examples_of_help_can_be_typed(name):
    shown = commands()[name].format_help().partition("example:\n")[2].splitlines()
    assert shown
    for line in shown:
        words = shlex.split(line)
        assert words[:3] == ["python", "-m", "overflow_fast"]
        assert make_parser().parse_args(words[3:]).command == name


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("/usr/bin/overflow-fast", "overflow-fast"),
        ("/site/overflow_fast/__main__.py", "python -m overflow_fast"),
    ],
)
def test_help_names_the_program_as_it_was_called(called, name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [called])
    assert make_parser().prog == name
    assert commands()["run"].prog == f"{name} run"


@pytest.mark.parametrize("is_there", [True, False])
def test_version(is_there, capsys, monkeypatch):
    monkeypatch.setattr("overflow_fast.binaries.is_there", lambda torch: is_there)
    with pytest.raises(SystemExit) as status:
        main(["--version"])
    assert status.value.code == 0
    shown = f"overflow_fast {__version__}, torch {torch.__version__}"
    lack = "" if is_there else ", no extension for it (see `env`)"
    assert capsys.readouterr().out == f"{shown}{lack}\n"


def test_a_build_without_cuda_kernels_says_so_once(caplog):
    from overflow_fast.scanner.callbacks import warn_of_no_kernels

    warn_of_no_kernels.cache_clear()
    warn_of_no_kernels()
    warn_of_no_kernels()
    assert len(caplog.records) == 1 and "OVERFLOW_FAST_CUDA=1" in caplog.text


def test_no_command_says_what_there_is(capsys):
    with pytest.raises(SystemExit) as status:
        main([])
    assert status.value.code == 2
    asked = capsys.readouterr().err
    assert all(name in asked for name in commands())


@pytest.mark.parametrize(
    ("typed", "given"),
    [
        ("--on-overflow skip", {"on_overflow": "skip"}),
        ("--include h.*,ln", {"include": ["h.*", "ln"]}),
        ("--watch tripwire", {"watch": "tripwire"}),
        ("--watch loss,weights", {"watch": ["loss", "weights"]}),
        ("--explain never", {"explain": Explain("never")}),
        ("--record r", {"record": Record("r")}),
        ("--every 3", {"schedule": Schedule(3)}),
        ("--sync lagged", {"sync": "lagged"}),
    ],
)
def test_options_of_the_guard_are_read(typed, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parsed = make_parser().parse_args(["run", *shlex.split(typed), "train.py"])
    assert guard_arguments(parsed) == given


def test_run_has_twelve_options():
    options = [each for each in commands()["run"]._actions if each.option_strings]
    assert len(options) == 1 + 12  # --help
    flags = [flag for each in options for flag in each.option_strings]
    for name in ("on_overflow", "watch", "include", "exclude", "sync"):
        assert f"--{name.replace('_', '-')}" in flags


FILE = """
on_overflow = "skip"
allow = {"*.attn:output" = "-inf"}
explain = {budget = 3, replay_safe = false}
log = "l"
schedule = 4
max_consecutive_skips = 2
[record]
path = "r"
mib = 8
[monitors.LayerAudit]
every = 9
[monitors.Spikes]
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Writes a file of arguments, and returns its path."""
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / "guard.toml").write_text(text)
        return "guard.toml"

    return write


def test_a_file_has_all_arguments(config):
    parsed = make_parser().parse_args(["run", "--config", config(FILE), "train.py"])
    assert guard_arguments(parsed) == {
        "on_overflow": "skip",
        "allow": {"*.attn:output": "-inf"},
        "explain": Explain(budget=3, replay_safe=False),
        "log": "l",
        "schedule": 4,
        "max_consecutive_skips": 2,
        "record": Record("r", mib=8),
        "monitors": [LayerAudit(9), Spikes()],
    }


@pytest.mark.parametrize("options", [GuardConfig, Evidence, Explain, Log, Record])
def test_a_file_names_every_argument_and_field_as_python_does(options, config):
    owner = "" if options is GuardConfig else options.__name__.lower()
    known = dict(options_of(options))
    text = f"[{owner}]\nxyzzy = 1" if owner else "xyzzy = 1"
    parsed = make_parser().parse_args(["run", "--config", config(text), "train.py"])
    with pytest.raises(ValueError) as refused:
        guard_arguments(parsed)
    assert all(name in str(refused.value) for name in known)


def test_what_is_typed_counts_more_than_the_file(config):
    text = 'log = "l"\non_overflow = "skip"\n[record]\nmib = 8'
    typed = f"run --config {config(text)} --record r --log m --on-overflow warn a.py"
    assert guard_arguments(make_parser().parse_args(typed.split())) == {
        "log": Log("m"),
        "on_overflow": "warn",
        "record": Record("r", mib=8),
    }


@pytest.mark.parametrize(
    "text",
    [
        'on_nan = "skip"',
        'on_overflow = "skipp"',
        'include = "h"',
        "record = 3",
        'record = {mb = 3, path = "r"}',
        'record = {mib = "3", path = "r"}',
        "record = {mib = 3}",
        'log = "guard.toml/l"',
        'record = ""',
        "schedule = 0",
        "schedule = {every = 2.5}",
        "monitors = [1]",
        "monitors = {Spike = {}}",
        "monitors = {Spikes = 1}",
        "monitors = {Headroom = {bits = -1}}",
        'metrics = "x"',
        'monitors = {Spikes = {action = "skip"}}\nsync = "lagged"',
        "x =",
    ],
)
def test_a_wrong_file_is_one_sentence(text, config, capsys, as_kept):
    assert main(["run", "--config", config(text), "a.py"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    as_kept(said)


def test_looking_whether_a_path_can_be_written_makes_nothing(config, tmp_path):
    assert main(["run", "--config", config('log = "new/l"'), "none.py"]) == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["none.toml", "."])
def test_a_file_that_is_not_there_is_one_sentence(name, capsys, as_kept, config):
    assert main(["run", "--config", name, "a.py"]) == 2
    as_kept(capsys.readouterr().err)


@pytest.mark.parametrize("name", ["report", "compare"])
def test_a_file_to_write_has_one_name_in_all_commands(name):
    options = [each.option_strings for each in commands()[name]._actions]
    assert ["-o", "--output"] in options


def test_help_of_run_has_defaults_and_no_python(monkeypatch, as_kept):
    monkeypatch.setenv("COLUMNS", "80")
    as_kept(commands()["run"].format_help())


@pytest.mark.parametrize("name", ["watch", "include", "exclude"])
def test_help_says_what_is_separated_by_commas(name):
    actions = commands()["run"]._actions
    (option,) = [each for each in actions if f"--{name}" in each.option_strings]
    assert option.help.endswith("separated by commas")


@pytest.mark.parametrize(
    "typed",
    [
        "run --on-overflow skipp a.py",
        "run --recrod r.ofr a.py",
        "run --xyzzy a.py",
        "rnu a.py",
        "suspects --jsn a",
        "run --every much a.py",
        "run --every 0 a.py",
        "run --watch wights a.py",
        "run --max-consecutive-skips 3 a.py",
        "doctor --seconds soon",
        "compare a",
        "run",
        "run --explain nevr a.py",
        "run --on-nan skip a.py",
        "run --schedule 3 a.py",
        "run --json a.py",
    ],
)
def test_a_wrong_argument_is_one_sentence(typed, capsys, as_kept):
    with pytest.raises(SystemExit) as ended:
        main(typed.split())
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.count("\n") == 1, err
    as_kept(err)


@pytest.mark.parametrize("option", ["--record", "--log", "--evidence"])
def test_a_path_that_cannot_be_written_ends_run_before_the_script(
    option, tmp_path, capsys
):
    """A file below a file, as root may write to any folder."""
    script, blocked = tmp_path / "a.py", tmp_path / "a.py" / "b"
    script.write_text("raise SystemExit('it ran')")
    assert main(["run", option, str(blocked), str(script)]) == 2
    err = capsys.readouterr().err
    kind = "a folder" if option == "--evidence" else "a file"
    assert err.startswith(f"overflow_fast run: {option} must be {kind} that can be")
    assert err.count("\n") == 1 and "it ran" not in err


@pytest.mark.parametrize("option", ["--record", "--log"])
def test_a_folder_is_no_file_to_write(option, tmp_path, capsys):
    assert main(["run", option, str(tmp_path), "a.py"]) == 2
    assert "it is a folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


WITHOUT_COMPILER = """
import sys
import overflow_fast
from overflow_fast.__main__ import main
for arguments in (["--version"], ["report", "--help"], ["run", "--help"], ["env"]):
    try:
        main(arguments)
    except SystemExit:
        pass
    assert "torch._dynamo" not in sys.modules, arguments
"""


def test_commands_without_a_model_do_not_import_the_compiler(fresh):
    fresh(WITHOUT_COMPILER)
