"""python -m overflow_fast, as a user calls it."""

import sys

import pytest
import torch
from processes import python

from overflow_fast.__main__ import main

SCRIPT = """
import sys
from transformers.debug_utils import DebugUnderflowOverflow
print(DebugUnderflowOverflow.__module__, __name__, sys.argv[1:])
import neighbour
sys.exit(int(sys.argv[1]))
"""


def command(*arguments, cwd=None):
    return python("-m", "overflow_fast", *arguments, cwd=cwd)


@pytest.fixture
def script(tmp_path):
    (tmp_path / "neighbour.py").write_text("print('found the neighbour')")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_runs_a_script_as_python_would(script):
    done = command("run", str(script), "3", "--debug", "underflow_overflow")
    assert done.returncode == 3
    assert done.stdout.splitlines() == [
        "overflow_fast.integrations.transformers __main__ "
        "['3', '--debug', 'underflow_overflow']",
        "found the neighbour",
    ]


def test_runs_a_module_as_python_would(script):
    done = command("run", "-m", "train", "0", cwd=script.parent)
    assert done.returncode == 0, done.stderr
    assert "overflow_fast.integrations.transformers __main__ ['0']" in done.stdout


def test_a_traceback_comes_through(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("1 / 0")
    done = command("run", str(path))
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


def test_a_program_that_is_not_there(tmp_path):
    done = command("run", str(tmp_path / "none.py"))
    assert done.returncode == 1
    assert "program must be a script or a folder with __main__.py" in done.stderr


def test_version(capsys):
    with pytest.raises(SystemExit) as status:
        main(["--version"])
    assert status.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("overflow_fast 0.1.0, torch ")
    has_cuda = torch.version.cuda is not None
    assert out.strip().endswith("CUDA kernels" if has_cuda else "no CUDA kernels")


def test_a_build_without_cuda_kernels_says_so_once(caplog):
    from overflow_fast.recording.coverage import warn_of_no_kernels

    warn_of_no_kernels.cache_clear()
    warn_of_no_kernels()
    warn_of_no_kernels()
    assert len(caplog.records) == 1 and "OVERFLOW_FAST_CUDA=1" in caplog.text


def test_no_command_says_what_there_is(capsys):
    with pytest.raises(SystemExit) as status:
        main([])
    assert status.value.code == 2
    assert "{demo,explain,report,run}" in capsys.readouterr().err


def test_the_demo_without_transformers_says_what_to_install(monkeypatch, capsys):
    for name in [n for n in sys.modules if n.startswith("overflow_fast.demo")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("overflow_fast.demo", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["demo"]) == 2
    assert "pip install transformers" in capsys.readouterr().err
