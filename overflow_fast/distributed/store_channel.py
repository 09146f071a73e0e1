"""Messages of ranks by way of the store, with a limit to the wait."""

from __future__ import annotations

import contextlib
import datetime
import pickle
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ..replay.replayer import NotJoined
from ..text import numbered
from ..torch_internals.module_internals import default_store

# A replay runs in step on all ranks; compiling code again takes longest in it.
PATIENCE_SECONDS = 300.0


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
