"""The answer to an alarm: which operation made the first bad value, and why."""

from __future__ import annotations

from .answer import ExplanationText
from .findings import Findings


class Explanation(Findings):
    """The findings of a replay of a non-finite step.

    Attributes:
        phase: Where the first bad value arose: "forward", "backward" or "optimizer", or
            where it already was: "data" or "weights". "" if that is not known. It is
            "backward", too, for one that the forward leaves out and backward meets.
        cause: Out of the table in `causes.py`; "" for a step that is finite.
        module: The name of the module whose code made it; "" for code outside modules.
        op: The operation that made it, or None if it is not known.
        tensor: The name of the bad weight, buffer or gradient, or the bad key of the
            batch; "" where there is none.
        sample: The sample of the batch that it comes from, or None.
        num_samples: How many samples the batch has; 0 if that is not known.
        chain: The operations from `op` to where the guard saw it.
        evidence: What was measured, in sentences. Where the operation is not known, the
            first one is the reason.
        notes: What could not be found out, and why, in sentences.
        rank: The rank that found it, of several that replayed the step together; else
            None.
        num_ranks: How many ranks found the like.
        replays: How often the step's forward was run.
        seconds: The time that the explanation took.
        remedies: What was tried on this step, what made it finite first.
        artifacts: The files that it leaves, where evidence is kept.
        lost_by: Where the cause is "underflow" or "rounding", the operation before `op`
            whose result in its dtype has lost the value; else None.
        reason: Why it is so in a clause, where the fields do not tell.
        news: What is new in the step beside those before it; "" for nothing that is
            known.
        advice: What to try where no remedy was tried; "" for what the cause says.
        forward: Which forward of the step it arose in, counted from 1, and of how many;
            None where there is one.
    """

    def __str__(self) -> str:
        """The answer in a line, and what it rests on, the remedies last."""
        return self.words.text()

    __repr__ = __str__  # in a console, too

    @property
    def words(self) -> ExplanationText:
        """Its sentences."""
        return ExplanationText(self)
