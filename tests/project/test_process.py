"""What is changed in a user's process is what the table in docs/limits.md says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import process_changes
import pytest
from process_changes import OWN, REPLAY, SCENARIOS

pytestmark = pytest.mark.slow
# Another thread looks meanwhile: a step may be run again just then, and is over later.
DURING = {"clean steps", "a bad step", "a step that raises", "compiling"}
LIMITS = Path(__file__).parents[2] / "docs" / "limits.md"


def rows():
    """The names that each row of the table is about, by what it begins with."""
    text = LIMITS.read_text().partition("## What is changed in your process")[2]
    table = [
        line for line in text.partition("\n## ")[0].splitlines() if line[:1] == "|"
    ]
    found = {}
    for line in table[2:]:
        what, when, *_ = [cell.strip() for cell in line.strip("|").split(" | ")]
        names = re.findall(r"`([a-zA-Z]\w*(?:\.\w+)+)`", what)
        found.setdefault(when, set()).update(names)
    return found


@pytest.fixture(scope="module", params=SCENARIOS)
def phases(request):
    """What a program has found in each phase, in a process of its own."""
    command = [sys.executable, "-W", "ignore", process_changes.__file__, request.param]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_nothing_is_changed_that_the_table_does_not_name(phases):
    table = rows()
    for phase, (begun, others, own) in phases.items():
        when = [*begun, REPLAY] if phase in DURING else begun
        listed = set().union(*(table[each] for each in when))
        assert set(others) <= listed, phase
        assert set(own) <= listed or OWN in begun, phase


def test_all_that_the_table_names_is_changed(phases):
    table = rows()
    for phase, (begun, others, own) in phases.items():
        for when in set(begun):
            assert table[when] <= {*others, *own}, phase
        assert own or OWN not in begun


def test_each_row_of_the_table_is_looked_at():
    names = [getattr(process_changes, each) for each in dir(process_changes)]
    assert set(rows()) <= {each for each in names if isinstance(each, str)}
