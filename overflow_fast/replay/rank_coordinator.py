"""The ranks that replay a step together: one leads, all run the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .explanation import Explanation

CLEAN, GIVEN, BAD, FAILED = range(4)  # states of a replayed call, by their weight
BEGIN = "begin"


class NotJoined(Exception):
    """A rank did not join the replay, which cannot go on without it."""


class OnRank(Exception):
    """An error of a replay that another rank has raised."""


class Channel(Protocol):
    """Lets ranks tell one another what they found, outside of the model's collectives.

    Attributes:
        rank: This rank.
    """

    rank: int

    def exchange(self, value: Any) -> Mapping[int, Any]:
        """Exchanges values; returns those of all ranks, by rank.

        Raises:
            NotJoined: If a rank gives nothing within the limit.
        """


class RankCoordinator:
    """One leads: it decides what is run, and all others run that too. Alone, one leads.

    What the ranks tell one another decides what each does next, so all run the same
    forwards and backwards, and the collectives in them meet.

    Args:
        channel: To the other ranks; None where there are none.
        lead: The rank that leads at first.
        can_cut: For each kept call, whether its batch has the same size on all ranks.

    Attributes:
        lead: The rank that leads.
        claims: How well each rank can say where bad values began.
        is_broken: Whether a rank was lost, or may be out of step.
        result: The explanation of the rank that led, once it is here; else None.
    """

    def __init__(
        self,
        channel: Channel | None = None,
        lead: int = 0,
        can_cut: Sequence[bool] = (),
    ) -> None:
        self._channel = channel
        self.rank = 0 if channel is None else channel.rank
        self.lead = self.rank if channel is None else lead
        self._can_cut = can_cut
        self.result: Explanation | None = None
        self.claims: Mapping[int, int] = {}
        self.is_broken = False

    @property
    def is_alone(self) -> bool:
        """True if there are no other ranks."""
        return self._channel is None

    @property
    def is_leader(self) -> bool:
        """True if this rank leads."""
        return self.rank == self.lead

    def can_cut(self, place: int) -> bool:
        """True if a part of a call's batch is the same part on all ranks."""
        return self.is_alone or self._can_cut[place]

    def order(self, order: Any) -> None:
        """Orders the others to do something; called by the rank that leads."""
        self._exchange(order)

    def receive(self) -> Any:
        """Receives an order of the rank that leads; an explanation ends the replay."""
        order = self._exchange(None)[self.lead]
        if isinstance(order, Explanation):
            self.result = order
        return order

    def agree(self, state: int, error: Exception | None) -> tuple[int, str, list[int]]:
        """Agrees on what a call has come to.

        Args:
            state: CLEAN, GIVEN, BAD or FAILED: what it is here.
            error: What it has raised here, or None.

        Returns:
            The worst state of all ranks, the error of another rank in text, or "", and
            the ranks where it was not clean.
        """
        text = "" if error is None else text_of(error)
        found = self._exchange((state, text))
        texts = [
            f"on rank {rank}: {each[1]}"
            for rank, each in found.items()
            if each[1] and rank != self.rank
        ]
        bad = [rank for rank, each in found.items() if each[0] != CLEAN]
        return max(each[0] for each in found.values()), "".join(texts[:1]), bad

    def check(self, error: Exception | None) -> None:
        """Raises on all ranks what one of them has met."""
        state, text, _ = self.agree(CLEAN if error is None else FAILED, error)
        if error is not None:
            raise error
        if state == FAILED:
            raise OnRank(text)

    def elect(self, claim: int) -> bool:
        """Gives the lead to the rank that can say best; it stays among equals.

        Args:
            claim: How well this one can say where bad values began.

        Returns:
            Whether this rank leads now.
        """
        self.claims = self._exchange(claim)
        best = max(self.claims.values())
        if self.claims[self.lead] != best:
            self.lead = min(rank for rank, each in self.claims.items() if each == best)
        return self.is_leader

    def finish(self, found: Explanation) -> Explanation:
        """Hands the explanation of the rank that leads to all.

        Args:
            found: This rank's, which counts where it leads, or a rank was lost.
        """
        if self.is_alone or self.is_broken or self.result is not None:
            return self.result or found
        try:
            if self.is_leader:
                self._exchange(found)
                return found
            if not isinstance(self.receive(), Explanation):
                raise NotJoined(f"Rank {self.rank} could not follow the replay.")
        except NotJoined as error:
            self.is_broken = True
            found.notes.append(str(error))
        return self.result or found

    def _exchange(self, value: Any) -> Mapping[int, Any]:
        if self._channel is None:
            return {self.rank: value}
        return self._channel.exchange(value)


def text_of(error: Exception) -> str:
    """The first line of an error, with its class."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:120] if lines else ''}"
