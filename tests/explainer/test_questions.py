"""Each question of the decision tree is answered by a program of its own.

A question that is added needs a program here, in which it is the one that answers.
"""

import dataclasses
import warnings

import pytest
import torch
from torch import nn

from overflow_fast import Explain, NonFiniteError, OverflowGuard, explain
from overflow_fast.explainer import questions, search
from overflow_fast.explainer.questions import BEFORE, FINITE, REPLAYED, TRACED

INF = float("inf")
TREE = (*BEFORE, *REPLAYED, *FINITE, *TRACED)


@pytest.fixture
def answered(monkeypatch):
    """The texts of questions that have answered, in order."""
    found = []

    def noted(question):
        def answer(search):
            answered = question.answer(search)
            if answered is not None:
                found.append(question.text)
            return answered

        return dataclasses.replace(question, answer=answer)

    for module in (questions, search):
        for name in ("BEFORE", "REPLAYED", "FINITE", "TRACED"):
            if hasattr(module, name):
                rows = tuple(map(noted, getattr(questions, name)))
                monkeypatch.setattr(module, name, rows)
    return found


def test_no_two_questions_are_the_same():
    texts = [each.text for each in TREE]
    assert len(texts) == len(set(texts))
    assert all(text.endswith((".", "?")) for text in texts)


