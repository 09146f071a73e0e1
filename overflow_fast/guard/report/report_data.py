"""The data of a report: a guard's findings in a step, and its action."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..verdict.entry_headroom import EntryHeadroom
from ..verdict.verdict import Verdict
from .cost import Cost
from .explanation import Explanation


@dataclass(repr=False)
class ReportData:
    """A guard's findings in a step, and its action.

    Attributes:
        step: The optimizer's step, counted from 0.
        action: "raise", "warn" or "skip".
        verdict: The first bad entry, and its origin.
        least_headroom: The finite value of the step that came nearest to its dtype's
            maximum.
        frames: The last frames up to the first bad one, as text.
        not_covered: What was not checked, in sentences.
        cost: The time that the guard took.
        num_skipped: How many steps were skipped so far, this one included.
        evidence: The folder with the tensors and the batch, or None.
        page: The page beside the evidence, or None.
        notes: Further sentences.
        where: The rank, host and device that found it, where ranks decide together.
        is_of_state: True if it is of a state that was to be saved, and of no step.
        moment: When it was found: "before" the optimizer's step, "after" it
            (`sync="lagged"`), in an "evaluation" (a forward without autograd), by a
            "check", when the program's own code "raised", or "" where it is of no step,
            or not decided yet.
        skipped_by: What has skipped the step instead of the guard: "GradScaler", or the
            optimizer's kernel on a device.
        explanation: The findings of a replay of the step; None if there was none.
        repeats: The earlier run that the log has the same step and entry of, or "".
        raised: The type of the exception that the program's own code has raised in the
            step, or "".
        is_beyond_repair: A weight or an optimizer's state stays non-finite, whatever
            becomes of the step: a checkpoint helps.
    """

    step: int
    action: str
    verdict: Verdict
    least_headroom: EntryHeadroom | None = None
    frames: list[str] = field(default_factory=list)
    not_covered: list[str] = field(default_factory=list)
    cost: Cost = field(default_factory=Cost)
    num_skipped: int = 0
    evidence: str | None = None
    page: str | None = None
    notes: list[str] = field(default_factory=list)
    where: str | None = None
    is_of_state: bool = False
    moment: str = ""
    skipped_by: str = ""
    explanation: Explanation | None = None
    repeats: str = ""
    raised: str = ""
    is_beyond_repair: bool = False
