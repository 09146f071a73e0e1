"""The data of a report: a guard's findings in a step, and its action."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..verdict.entry_headroom import EntryHeadroom
from ..verdict.verdict import Verdict
from .cost import Cost
from .explanation import Explanation


@dataclass(repr=False)
class ReportData:
    """The fields of a `Report`, whose docstring says what each is."""

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
    raised: str = ""
    is_beyond_repair: bool = False
