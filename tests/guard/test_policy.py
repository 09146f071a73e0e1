"""The policy as a function: which action follows from what was asked and the facts."""

import itertools
import re

import pytest
import torch

from overflow_fast.guard.policy import Situation, checked_action, choose
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
    "answer, got",
    [
        *[(None, "None"), (True, "True"), (0, "0"), (0.5, "0.5"), (b"skip", "bytes")],
        *[(("skip",), "tuple"), (["skip"], "list"), (torch.ones(3), "Tensor")],
        (Report(0, "skip", Verdict()), "Report"),
        *((each, repr(each)) for each in ("stop", "Skip", "", "skip ")),
    ],
)
def test_anything_but_an_action_is_an_error(answer, got):
    wanted = f"on_overflow must return 'raise', 'warn' or 'skip', got {got}"
    error = ValueError if isinstance(answer, str) else TypeError
    with pytest.raises(error, match=f"^{re.escape(wanted)}$"):
        checked_action(answer)
