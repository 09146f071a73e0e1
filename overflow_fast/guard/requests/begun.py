"""The requests that have begun and not ended, by the context that they have begun in.

A task of asyncio has a context of its own, which `asyncio.to_thread` passes on; other
threads begin without a request. A generator has the context of whoever runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any


class Begun:
    """A request that has begun.

    Args:
        owner: Whose requests these are: those of a guard.
        request: The request.

    Attributes:
        owner, request: The same; None once it has ended, since what was started within
            it may go on in its context.
    """

    def __init__(self, owner: object, request: Any) -> None:
        self.owner: object = owner
        self.request: Any = request
        self.before = _innermost()
        _BEGUN.set(self)

    def end(self) -> None:
        """Ends it, in whatever context."""
        self.owner = self.request = None
        _BEGUN.set(_innermost())


_BEGUN: ContextVar[Begun | None] = ContextVar("overflow_fast", default=None)


def request_of(owner: object) -> Any:
    """The request that this code is in, of one owner; None if it is in none."""
    each = _BEGUN.get()
    while each is not None and each.owner is not owner:
        each = each.before
    return None if each is None else each.request


def requests_around(owner: object) -> Iterator[Any]:
    """Yields the requests of one owner that this code is in, the last one first."""
    return (each.request for each in _begun() if each.owner is owner)


def _begun() -> Iterator[Begun]:
    """Yields what has begun in this context, the last one first."""
    each = _BEGUN.get()
    while each is not None:
        yield each
        each = each.before


def _innermost() -> Begun | None:
    return next((each for each in _begun() if each.owner is not None), None)
