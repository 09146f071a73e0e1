"""The policy as a function: which action follows from what was asked and the facts."""

import enum
import itertools
import re

import pytest
import torch

from overflow_fast.guard.policy import Situation, checked_action, choose, limit_skips
from overflow_fast.guard.report.report import Report
from overflow_fast.guard.verdict.verdict import Verdict

pytestmark = pytest.mark.day  # a contract: all of its cases

FACTS = list(itertools.product([False, True], repeat=5))


@pytest.mark.parametrize("asked", ["raise", "warn"])
@pytest.mark.parametrize("facts", FACTS)
def test_what_can_be_done_in_any_situation_is_done(asked, facts):
    assert choose(asked, Situation(*facts)).action == asked


@pytest.mark.parametrize("facts", FACTS)
def test_a_skip_happens_where_it_can_and_helps(facts):
    situation = Situation(*facts)
    can_skip, is_skipped, is_undone, is_beyond_repair, is_apart = facts
    choice = choose("skip", situation)
    if not can_skip and not is_skipped:
        assert choice.action == "warn"
    elif is_beyond_repair and not is_undone:
        assert choice.action == "raise"
        assert "checkpoint" in choice.notes[0]
    elif is_apart and not is_skipped:
        assert choice.action == "raise"
        assert "process_group=" in choice.notes[0]
    else:
        assert choice.action == "skip" and not choice.notes


@pytest.mark.parametrize(
    "in_row, most, action", [(1, 1, "skip"), (2, 1, "raise"), (1, 0, "raise")]
)
def test_skips_in_a_row_end(in_row, most, action):
    choice = limit_skips(in_row, most)
    assert choice.action == action
    assert bool(choice.notes) == (action == "raise")


class Choice(str, enum.Enum):
    SKIP = "skip"


@pytest.mark.parametrize("answer", ["raise", "warn", "skip", Choice.SKIP])
def test_a_callable_returns_an_action(answer):
    action = checked_action(answer)
    assert type(action) is str
    assert action == answer


@pytest.mark.parametrize(
    "answer, got",
    [
        *[(None, "None"), (True, "True"), (0, "0"), (0.5, "0.5"), (b"skip", "bytes")],
        *[(("skip",), "tuple"), (["skip"], "list"), (torch.ones(3), "Tensor")],
        (Report(0, "skip", Verdict()), "Report"),
    ],
)
def test_anything_but_a_string_is_a_type_error(answer, got):
    wanted = f"on_overflow must return 'raise', 'warn' or 'skip', got {got}"
    with pytest.raises(TypeError, match=f"^{re.escape(wanted)}$"):
        checked_action(answer)


@pytest.mark.parametrize("answer", ["stop", "Skip", "", "skip "])
def test_another_string_is_a_value_error(answer):
    wanted = f"on_overflow must return 'raise', 'warn' or 'skip', got {answer!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(wanted)}$"):
        checked_action(answer)
