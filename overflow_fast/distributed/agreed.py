"""The agreement of ranks on a step, and the order of their findings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from ..report.report import Report
from .participants import world_size

# The rank with the earliest bad value decides: one that a collective of the training
# has mixed into a gradient is bad on every rank.
_LAST = 2**24
_SEVERITY = {"grad_output": 2, "gradient": 1, "optimizer_state": 1}


class Agreed(NamedTuple):
    """The agreement of ranks on a step.

    Attributes:
        report: The report that all ranks act on, or None if no rank has found anything.
        is_own: Whether it is this rank's own.
        rank: The rank whose it is.
        offers: What each rank has said along with its report, by rank.
        has_spike: Whether a rank has seen a spike.
        wants_skip: Whether a monitor of a rank wants to skip the step.
    """

    report: Report | None
    is_own: bool = False
    rank: int = 0
    offers: dict[int, Any] = {}  # noqa: RUF012 - it is never written to
    has_spike: bool = False
    wants_skip: bool = False


def priority_of(kind: str, position: int) -> int:
    """A number that is larger for an earlier bad value, then for a lower rank."""
    severity, earliness = _SEVERITY.get(kind, 3), max(0, _LAST - position)
    rank = dist.get_rank() if world_size() > 1 else 0
    return (severity * (_LAST + 1) + earliness) * _LAST - rank


def attempted(
    is_own: bool, make: Callable[[], Report]
) -> tuple[Report | str | None, Exception | None]:
    """Makes a report, or the text of an error: the other ranks wait for one of them."""
    if not is_own:
        return None, None
    try:
        return make(), None
    except Exception as error:
        return f"{type(error).__name__}: {error}", error
