"""Decodes the lines of a log, also those of kinds that this version does not know."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from ...guard.files.fields import Index, StepNumber, Time, meaning
from ...guard.files.schema import Lines
from ...guard.report.log_lines import KINDS


class OtherLine(Struct, kw_only=True):
    """A line of a kind that this version does not know."""

    kind: Annotated[str, meaning("its kind")]
    run: Annotated[str, meaning("the id of the run")] = ""
    time: Annotated[Time, meaning("when it was written")] = 0.0
    rank: Annotated[Index | None, meaning("the rank")] = None
    step: Annotated[StepNumber | None, meaning("the number of the step")] = None
    action: Annotated[str | None, meaning("what was done")] = None
    is_clean: Annotated[bool | None, meaning("false if the step was not finite")] = None


def decoder() -> Lines:
    """Returns what decodes the lines."""
    return Lines(*KINDS, other=OtherLine)
