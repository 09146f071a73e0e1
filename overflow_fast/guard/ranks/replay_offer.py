"""The part of each rank in a replay: all of them replay a step together, or none does.

They decide by what all have offered when they agreed on the step's verdict.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ReplayOffer:
    """The part of a rank in a replay, as it reports it.

    Attributes:
        is_due: Whether it wants one, if the report is its own.
        why_not: Why it cannot take part, or "".
        calls: For each kept call, whether it has a backward, and a loss.
        sizes: The sizes of their batches, or None.
        session: A name for the replay.
    """

    is_due: bool
    why_not: str
    calls: tuple[tuple[bool, bool], ...] = ()
    sizes: tuple[int | None, ...] = ()
    session: str = field(default_factory=lambda: uuid.uuid4().hex)


def why_not_together(offers: Mapping[int, ReplayOffer]) -> str:
    """Why the ranks cannot replay the step, the same on all of them, or ""."""
    for rank, offer in sorted(offers.items()):
        if offer.why_not:
            return f"The step was not replayed: rank {rank} {offer.why_not}."
    if len({offer.calls for offer in offers.values()}) == 1:
        return ""
    return "The step was not replayed: the ranks kept different forwards of it."
