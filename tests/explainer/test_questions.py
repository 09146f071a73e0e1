"""The decision tree: which evidence lets which question answer, before all after it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from overflow_fast.explainer import questions
from overflow_fast.explainer.bad_step import BadStep
from overflow_fast.explainer.questions import BEFORE, FINITE, REPLAYED, TRACED
from overflow_fast.explainer.replayer import ReplayResult
from overflow_fast.guard.kept_calls.call_keeper import KeptCalls

pytestmark = pytest.mark.day  # a contract: all of its cases

BAD = [torch.tensor(float("inf"))]


def searched(
    *,
    first=None,
    traced=None,
    calls=None,
    returns_loss=True,
    is_forward_finite=False,
    is_seen_in_call=False,
    set_meanwhile=(),
    is_alone=True,
    has_hooks=False,
    kept=None,
    **seen,
):
    """A search that knows this; as it is, nothing explains a loss of a finite step."""
    call = SimpleNamespace(
        has_stand_ins=False,
        num_held=1,
        held={0: None},
        is_part_of_compiled=False,
        is_overwritten=lambda: False,
        computed_outside=list,
        returns_loss=True,
    )
    was_kept = KeptCalls()
    vars(was_kept).update(kept or {})
    seen = {"kind": "output", **seen}
    return SimpleNamespace(
        step=BadStep({"": nn.Linear(1, 1)}, kept=was_kept, **seen),
        first=ReplayResult(**{"has_backward": True, **(first or {})}),
        traced=ReplayResult(**(traced or {})),
        replayer=SimpleNamespace(
            calls=[SimpleNamespace(**{**vars(call), **(calls or {})})],
            returns_loss=returns_loss,
            ranks=SimpleNamespace(is_alone=is_alone),
            state=SimpleNamespace(
                has_hooks=has_hooks, is_of_other_form=lambda: False, lost=[]
            ),
        ),
        difference=None,
        num_unlike=0,
        set_meanwhile=list(set_meanwhile),
        is_forward_finite=is_forward_finite,
        is_seen_in_call=is_seen_in_call,
    )


GRADIENT = {"kind": "gradient", "gradients": {"weight": BAD[0]}}
RAISED = {"error": ValueError("no")}
# The evidence for each question, in the order of the lists.
EVIDENCE = {
    "BEFORE": [
        {"kind": "weight"},
        {"world_size": 2},
        {"num_calls": 0},
        {"kind": "grad_output"},
    ],
    "REPLAYED": [
        {"kind": "", "first": RAISED},
        {},
    ],
    "FINITE": [
        {"kind": ""},
        {**GRADIENT, "kept": {"left_over": {"weight": 3}}},
        {"kind": "weight"},
        {"calls": {"has_stand_ins": True}},
        {"kind": "buffer"},
        {"kind": "grad_output", "first": {"has_backward": False}},
        {"first": {"bad_held": True}},
        {"kind": "recorded", "is_given": True, "returns_loss": False},
        {"kind": "recorded", "returns_loss": False},
        {**GRADIENT, "is_alone": False},
        {**GRADIENT, "has_hooks": True},
        {"calls": {"num_held": 2}, "returns_loss": False},
        {"set_meanwhile": ["0.factor"]},
        {**GRADIENT, "returns_loss": False},
        {},
    ],
    "TRACED": [
        {"is_seen_in_call": True},
        {},
        {"first": {"bad_outputs": BAD}, "traced": {"has_raised": True}},
        {"first": {"bad_outputs": BAD}, "traced": {"bad_outputs": BAD}},
        {"first": {"bad_outputs": BAD}},
    ],
}
LISTS = {"BEFORE": BEFORE, "REPLAYED": REPLAYED, "FINITE": FINITE, "TRACED": TRACED}
ROWS = [(name, place) for name, rows in LISTS.items() for place in range(len(rows))]


@pytest.mark.parametrize(("name", "place"), ROWS)
def test_evidence_lets_its_question_answer_first(name, place, monkeypatch):
    evidence = dict(EVIDENCE[name][place])
    num_calls = evidence.pop("num_calls", 1)
    size = evidence.pop("world_size", 1)
    monkeypatch.setattr(questions, "world_size", lambda: size)
    search = searched(**evidence)
    search.replayer.calls = search.replayer.calls[:num_calls]
    assert [each.is_so(search) for each in LISTS[name]].index(True) == place


def test_each_question_has_its_evidence_here():
    assert {n: len(r) for n, r in LISTS.items()} == {
        n: len(r) for n, r in EVIDENCE.items()
    }


def test_lists_that_must_answer_end_with_a_question_that_always_does():
    nothing = searched(first={"bad_outputs": BAD})
    assert FINITE[-1].is_so(nothing) and TRACED[-1].is_so(nothing)


@pytest.mark.parametrize(
    "doubt",
    [
        {"is_late": True},
        {"kept": {"num_dropped": 2}},
        {"set_meanwhile": ["0.factor"]},
        {"calls": {"is_overwritten": lambda: True}},
        {"calls": {"is_part_of_compiled": True}},
    ],
)
def test_a_replay_in_doubt_is_not_called_not_reproducible(doubt):
    search = searched(**doubt)
    asked = next(each for each in FINITE if each.is_so(search))
    found = asked.answer(search)
    assert (found.cause, len(found.notes)) == ("unknown", 1)
