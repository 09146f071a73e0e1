"""Tells whether all ranks can replay a step together, as they agree on its verdict."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..core.wrapped import why_not
from ..distributed.store_channel import StoreChannel
from ..replay.capture import Capture
from ..replay.kept_call import KeptCall
from ..replay.parts import batch_size
from ..replay.team import Team

_Shape = tuple[bool, bool]


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
    calls: tuple[_Shape, ...] = ()
    sizes: tuple[int | None, ...] = ()
    session: str = field(default_factory=lambda: uuid.uuid4().hex)


def offer_of(
    is_due: bool, capture: Capture | None, models: Sequence[nn.Module], joins: bool
) -> ReplayOffer:
    """Makes this rank's offer. Calls no collective.

    Args:
        is_due: See `ReplayOffer`.
        capture: What was kept of the step; None where nothing is to be explained.
        models: The watched models.
        joins: Whether ranks without batches shadow the others' steps.
    """
    if capture is None:
        return ReplayOffer(is_due, "keeps no steps (explain, replay_safe or sync)")
    if joins:
        return ReplayOffer(is_due, "is within a Join, where others have no batch")
    why = why_not(models)
    if not why and not capture.calls:
        why = "kept no forward of it, which " * bool(capture.hidden_by)
        why += capture.hidden_by or "kept no forward of it; use `guard.run()`"
    calls = tuple(map(_shape_of, capture.calls))
    return ReplayOffer(is_due, why, calls, tuple(map(batch_size, capture.calls)))


def _shape_of(call: KeptCall) -> _Shape:
    return bool(call.held), call.returns_loss


def why_not_together(offers: Mapping[int, ReplayOffer]) -> str:
    """Why the ranks cannot replay the step, the same on all of them, or ""."""
    for rank, offer in sorted(offers.items()):
        if offer.why_not:
            return f"The step was not replayed: rank {rank} {offer.why_not}."
    if len({offer.calls for offer in offers.values()}) > 1:
        return "The step was not replayed: the ranks kept different forwards of it."
    return ""


def team_of(offers: Mapping[int, ReplayOffer], lead: int) -> Team:
    """The ranks that replay a step.

    Args:
        offers: What each of them has offered.
        lead: The rank whose report it is.
    """
    sizes: Any = zip(*(offer.sizes for offer in offers.values()), strict=True)
    can_cut = [len(set(each)) == 1 for each in sizes]
    return Team(StoreChannel(sorted(offers), offers[lead].session), lead, can_cut)
