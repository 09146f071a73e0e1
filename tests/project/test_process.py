"""What is changed in a user's process is what the table in docs/limits.md says."""

import json
import re
from pathlib import Path

import process_changes
import pytest
from process_changes import OWN, REPLAY, SCENARIOS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]
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
def phases(request, fresh):
    """What a program has found in each phase, in a process of its own."""
    code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
    printed = fresh(code, process_changes.__file__, request.param)
    return json.loads(printed.splitlines()[-1])


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
