"""A rank and what it runs on, as reports have it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FORM = re.compile(r"rank (\d+) of (\d+) \((.+), ([^,]+)\)")


@dataclass(frozen=True)
class RankInfo:
    """A rank and what it runs on. `str()` of it is as reports have it.

    Attributes:
        rank: The rank.
        world_size: How many ranks there are.
        host: The name of its host.
        device: Its device, such as "cuda:2".
    """

    rank: int
    world_size: int
    host: str
    device: str

    def __str__(self) -> str:
        """Writes "rank 2 of 4 (node3, cuda:2)"."""
        return f"rank {self.rank} of {self.world_size} ({self.host}, {self.device})"

    @classmethod
    def of(cls, text: str | None) -> RankInfo | None:
        """Reads what `str()` has written; None for anything else."""
        found = _FORM.fullmatch(text or "")
        if found is None:
            return None
        return cls(int(found[1]), int(found[2]), found[3], found[4])
