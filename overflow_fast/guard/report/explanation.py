"""The answer to an alarm: which operation made the first bad value, and why."""

from __future__ import annotations

from .answer import ExplanationText
from .findings import Findings


class Explanation(Findings):
    """The findings of a replay of a non-finite step, and their words.

    Its fields are those of `Findings`.
    """

    def __str__(self) -> str:
        """The answer in a line, and what it rests on, the remedies last."""
        return self.words.text()

    __repr__ = __str__  # in a console, too

    @property
    def words(self) -> ExplanationText:
        """Its sentences."""
        return ExplanationText(self)
