"""The policy as a function: which action follows from what was asked and the facts."""

import itertools

import pytest

from overflow_fast.guard.policy import Situation, checked_action, choose, limit_skips

FACTS = list(itertools.product([False, True], repeat=4))


@pytest.mark.parametrize("asked", ["raise", "warn"])
@pytest.mark.parametrize("facts", FACTS)
def test_what_can_be_done_in_any_situation_is_done(asked, facts):
    assert choose(asked, Situation(*facts)).action == asked


@pytest.mark.parametrize("facts", FACTS)
def test_a_skip_happens_where_it_can_and_helps(facts):
    situation = Situation(*facts)
    can_skip, is_skipped, is_undone, is_beyond_repair = facts
    choice = choose("skip", situation)
    if not can_skip and not is_skipped:
        assert choice.action == "warn"
    elif is_beyond_repair and not is_undone:
        assert choice.action == "raise"
        assert "checkpoint" in choice.notes[0]
    else:
        assert choice.action == "skip" and not choice.notes


@pytest.mark.parametrize(
    "in_row, most, action", [(1, 1, "skip"), (2, 1, "raise"), (1, 0, "raise")]
)
def test_skips_in_a_row_end(in_row, most, action):
    choice = limit_skips("skip", in_row, most)
    assert choice.action == action
    assert bool(choice.notes) == (action == "raise")


def test_a_callable_may_return_an_action_or_none():
    assert [checked_action(a) for a in ("skip", None)] == ["skip", "warn"]
    with pytest.raises(ValueError, match="got 'stop'"):
        checked_action("stop")
