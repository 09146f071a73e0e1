"""Reports on a terminal: its width and its colours, and nothing elsewhere."""

import fcntl
import io
import os
import pty
import re
import struct
import termios

import pytest
from processes import python

from overflow_fast.tools.cli.terminal import is_shown_as_it_is, shown

COLOUR = re.compile(r"\x1b\[[\d;]*m")


@pytest.fixture
def report():
    return """\
Step 3: the loss is inf. log(0) at train.py:8: softmax (train.py:7) underflowed to 0.
The optimizer step was not made.
It was non-finite when the model received it: it came from the batch or from the
  training loop: `input[0]`, sample 2 of 4 (from 0).
code      return -torch.log(probabilities_of_each_class).mean() + 0.0 * regularizer
                  ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
evidence  29 -inf of 48 values; inputs finite: [16, 3] in magnitude 0 to 1; its input \
is 0 at [0, 0]; log needs one above 0
did not help: clamp the logarithm's argument to at least 1e-30
tried     use log_softmax (train.py:8): finite, loss 540.4
    return -logits.log_softmax(-1).mean()  # a line of code is never broken anywhere
stage              ranks  seconds  result, which stands in a column of its own
roll call              2      0.0  fine"""


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_a_report_is_left_alone_where_no_terminal_is(report):
    assert shown(report, io.StringIO()) == report
    assert is_shown_as_it_is(io.StringIO())


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_report_is_wrapped_at_a_terminal_s_width(width, report, monkeypatch, as_kept):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    as_kept(shown(report, Terminal()))


def test_columns_of_a_table_and_code_are_never_broken(report, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    lines = shown(report, Terminal()).split("\n")
    beginnings = "    ", "stage", "roll call"
    whole = [e for e in report.split("\n") if e.startswith(beginnings)]
    assert [e for e in lines if e in whole] == whole


def test_colours_change_no_character(report, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    coloured = shown(report, Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert COLOUR.sub("", coloured) == shown(report, Terminal()) != coloured
    first, second, *_ = coloured.split("\n")
    assert COLOUR.match(first) and not COLOUR.match(second)


@pytest.mark.parametrize(
    ("variables", "is_terminal", "has_colours"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_colours_are_where_a_terminal_or_the_user_asks_for_them(
    variables, is_terminal, has_colours, report, monkeypatch
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = Terminal() if is_terminal else io.StringIO()
    assert bool(COLOUR.search(shown(report, stream))) == has_colours


PROGRAM = """
import torch
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = -torch.softmax(1e4 * model(torch.ones(16, 4)), 1).log().mean()
loss.backward()
optimizer.step()
"""

ON_TERMINAL = """
import os, sys
from overflow_fast.__main__ import main
terminal = os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY)
os.dup2(terminal, 1), os.dup2(terminal, 2)
sys.exit(main(["run", sys.argv[2]]))
"""


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_a_program_s_error_has_the_width_of_the_terminal_it_runs_in(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 72, 0, 0))
    done = python("-c", ON_TERMINAL, os.ttyname(its), str(script))
    assert done.returncode == 3, done.stderr
    os.close(its)
    said = b""
    while part := _read(ours):
        said += part
    text = said.decode().replace("\r", "").partition("NonFiniteError")[2]
    assert COLOUR.search(text)
    plain = COLOUR.sub("", text).split("\n")
    sentences = [e for e in plain if not e.startswith(("code", " "))]
    assert len(sentences) > 3 and max(map(len, sentences)) <= 72


def _read(end):
    try:
        return os.read(end, 65536)
    except OSError:  # the other end was closed
        return b""
