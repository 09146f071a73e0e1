"""Changes of what is not the package's own: there while somebody needs them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any


class Needing:
    """Objects that need a change, held weakly; the last one that goes ends it.

    Args:
        end: Ends the change, if there is one. False if the collector calls it, in any
            thread and at any moment: it must wait for nothing then.
    """

    def __init__(self, end: Callable[[bool], None]) -> None:
        self._end = end
        self._gone: dict[int, weakref.finalize[Any, Any]] = {}

    def add(self, needing: object) -> None:
        """Takes an object in, once."""
        if id(needing) not in self._gone:
            gone = weakref.finalize(needing, self._drop, id(needing), False)
            gone.atexit = False
            self._gone[id(needing)] = gone

    def discard(self, needing: object) -> None:
        """Lets an object go."""
        self._drop(id(needing), True)

    def _drop(self, number: int, may_wait: bool) -> None:
        gone = self._gone.pop(number, None)
        if gone is None:
            return
        gone.detach()
        if not self._gone:
            self._end(may_wait)

    def __iter__(self) -> Iterator[Any]:
        found = [gone.peek() for gone in list(self._gone.values())]
        return (each[0] for each in found if each is not None)

    def __len__(self) -> int:
        return len(self._gone)
