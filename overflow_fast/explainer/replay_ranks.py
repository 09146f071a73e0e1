"""The ranks that replay a step together: one leads, and all run the same.

They exchange messages through the store at which they met, with a limit to the wait.
"""

from __future__ import annotations

import contextlib
import datetime
import pickle
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ..base.text import error_line, numbered
from ..guard.report.explanation import Explanation
from ..guard.report.notes import ENDED_EARLY
from ..torch_internals.module_internals import default_store
from .effects.rule import StoppedError

CLEAN, GIVEN, BAD, FAILED = range(4)  # states of a replayed call, by their weight
BEGIN = "begin"


class NotJoined(Exception):
    """A rank did not join the replay, which cannot go on without it."""


class OnRank(Exception):
    """An error of a replay that another rank has raised."""


class RankCoordinator:
    """One leads: it decides what is run, and all others run that too. Alone, one leads.

    What the ranks tell one another decides what each does next, so all run the same
    forwards and backwards, and the collectives in them meet.

    Args:
        channel: To the other ranks; None where there are none.
        lead: The rank that leads at first.
        can_cut: For each kept call, whether its batch has the same size on all ranks.

    Attributes:
        channel: To the other ranks; None where there are none.
        lead: The rank that leads.
        claims: How well each rank can say where bad values began.
        is_broken: Whether a rank was lost, or may be out of step.
        result: The explanation of the rank that led, once it is here; else None.
    """

    def __init__(
        self,
        channel: StoreChannel | None = None,
        lead: int = 0,
        can_cut: Sequence[bool] = (),
    ) -> None:
        self.channel = channel
        self.rank = 0 if channel is None else channel.rank
        self.lead = self.rank if channel is None else lead
        self._can_cut = can_cut
        self.result: Explanation | None = None
        self.claims: Mapping[int, int] = {}
        self.is_broken = False

    @property
    def is_alone(self) -> bool:
        """True if there are no other ranks."""
        return self.channel is None

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

    def agree(
        self, state: int, error: Exception | None
    ) -> tuple[int, Exception | None, list[int]]:
        """Agrees on what a call has come to.

        Args:
            state: CLEAN, GIVEN, BAD or FAILED: what it is here.
            error: What it has raised here, or None.

        Returns:
            The worst state of all ranks, this rank's error, else one of another rank,
            or None, and the ranks where it was not clean.
        """
        is_stopped = isinstance(error, StoppedError)
        text = str(error) if is_stopped else error and error_line(error)
        found = self._exchange((state, text, is_stopped))
        bad = [rank for rank, each in found.items() if each[0] != CLEAN]
        for rank, (_, other, was_stopped) in found.items():
            if error is None and other:
                error = (
                    StoppedError(f"{other} (rank {rank})")
                    if was_stopped
                    else OnRank(f"on rank {rank}: {other}")
                )
        return max(each[0] for each in found.values()), error, bad

    def tell(self, error: Exception) -> None:
        """Tells the others that this rank's run has ended early."""
        if self.channel is not None:
            what = str(error) if isinstance(error, StoppedError) else error_line(error)
            self.channel.tell(f"{what} (rank {self.rank})")

    def check(self, error: Exception | None) -> None:
        """Raises on all ranks what one of them has met."""
        found = self.agree(CLEAN if error is None else FAILED, error)[1]
        if found is not None:
            raise found

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
            found.notes.append(self.note_end(error))
        return self.result or found

    def note_end(self, error: Exception) -> str:
        """The note on an error that has ended the explanation of this rank."""
        if not isinstance(error, NotJoined):
            return ENDED_EARLY.format(error_line(error))
        self.is_broken = True
        return str(error)

    def _exchange(self, value: Any) -> Mapping[int, Any]:
        if self.channel is None:
            return {self.rank: value}
        return self.channel.exchange(value)


# The channel.


# A replay runs in step on all ranks; compiling code again takes longest in it.
PATIENCE_SECONDS = 300.0
_PAUSE = 0.001  # seconds


class StoreChannel:
    """Exchanges values by the store at which the ranks met.

    Process groups are not used: where one rank has left a forward by an exception, and
    another waits in a collective of it, a collective of ours would be taken for that.
    The first rank gathers, so that each exchange takes a few requests of every other.

    Args:
        ranks: The ranks, in order, this one among them.
        session: A name that no other replay has.

    Attributes:
        rank: This rank.
    """

    def __init__(self, ranks: Sequence[int], session: str) -> None:
        self.rank = dist.get_rank()
        self._ranks = list(ranks)
        self._session = session
        self._store = default_store()
        self._round = 0
        self._limit = datetime.timedelta(seconds=PATIENCE_SECONDS)
        self._met: dict[tuple[int, str], int] = {}

    def meet(self, name: str, ranks: Sequence[int]) -> str:
        """Waits until all ranks of a group are about to make its next collective call.

        One that was ended before an effect makes none: the others would wait for it in
        the collective, where nothing can end them. If the store fails, that is let be.

        Args:
            name: The group's.
            ranks: Its ranks.

        Returns:
            Why one of them does not come, or "".
        """
        if not set(ranks) <= set(self._ranks):
            return ""
        place = self._round, name
        self._met[place] = self._met.get(place, 0) + 1
        key = self._key(f"{name}/{self._met[place]}")
        end = time.monotonic() + PATIENCE_SECONDS
        with contextlib.suppress(Exception):
            self._store.add(key, 1)
            while time.monotonic() < end and self._store.add(key, 0) < len(ranks):
                if self._store.check([self._key("ended")]):
                    return bytes(self._store.get(self._key("ended"))).decode()
                time.sleep(_PAUSE)
        return ""

    def tell(self, text: str) -> None:
        """Lets those that wait in `meet()` know that this rank does not come."""
        with contextlib.suppress(Exception):
            self._store.set(self._key("ended"), text)

    def exchange(self, value: Any) -> dict[int, Any]:
        """Exchanges values; returns those of all ranks, by rank.

        Raises:
            NotJoined: If a rank gives nothing within the limit.
        """
        self._round += 1
        try:
            self._store.set(self._key(self.rank), pickle.dumps(value))
            if self.rank == self._ranks[0]:
                self._store.set(self._key("all"), pickle.dumps(self._gathered()))
            # The first rank may have begun to wait for another only now.
            found = self._get(self._key("all"), 2 * self._limit)
        except Exception as error:
            raise NotJoined(self._sentence(self._ranks[:1])) from error
        if isinstance(found, list):
            raise NotJoined(self._sentence(found))
        gathered: dict[int, Any] = found
        return gathered

    def _gathered(self) -> dict[int, Any] | list[int]:
        """The values of all ranks; the ranks that gave none, if there are any."""
        keys = {rank: self._key(rank) for rank in self._ranks}
        try:
            self._store.wait(list(keys.values()), self._limit)
        except Exception:
            gone = [rank for rank, key in keys.items() if not self._store.check([key])]
            if gone:
                return gone
        found = {rank: pickle.loads(self._store.get(key)) for rank, key in keys.items()}
        self._forget(keys.values())
        return found

    def _forget(self, keys: Any) -> None:
        """Removes what was read: all ranks have read the last round's by now."""
        with contextlib.suppress(Exception):  # not all stores can
            for key in (*keys, self._key("all", self._round - 1)):
                self._store.delete_key(key)

    def _get(self, key: str, limit: datetime.timedelta) -> Any:
        self._store.wait([key], limit)
        return pickle.loads(self._store.get(key))

    def _key(self, part: object, number: int | None = None) -> str:
        number = self._round if number is None else number
        return f"overflow_fast/replay/{self._session}/{number}/{part}"

    def _sentence(self, ranks: Sequence[int]) -> str:
        are_gone = "or is gone" if len(ranks) == 1 else "or are gone"
        return (
            f"The replay ended early: {numbered('rank', ranks)} did not join it within "
            f"{self._limit.total_seconds():.0f} s, {are_gone}."
        )
