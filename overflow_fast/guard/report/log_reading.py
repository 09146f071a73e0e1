"""Decodes the lines of a log, also those of kinds that this version does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..files.fields import Index, StepNumber, Time, Written
from ..files.fields import written as field
from .log_lines import KINDS

if TYPE_CHECKING:
    from ..files.schema import Lines


class OtherLine(Written):
    """A line of a kind that this version does not know."""

    kind: str = field("its kind")
    run: str = field("the id of the run", "")
    time: Time = field("when it was written", 0.0)
    rank: Index | None = field("the rank", None)
    step: StepNumber | None = field("the number of the step", None)
    action: str | None = field("what was done", None)
    is_clean: bool | None = field("false if the step was not finite", None)


def decoder() -> Lines:
    """Returns what decodes the lines; needs msgspec."""
    from ..files.schema import Lines

    return Lines(*KINDS, other=OtherLine)
