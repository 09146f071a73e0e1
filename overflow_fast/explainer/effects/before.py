"""The iterators, generators and files that are there before a replay.

A replay may take from those of its own, and from none of these.
"""

from __future__ import annotations

import contextlib
import gc
import io
import operator
import weakref
from collections.abc import Iterable
from typing import Any

from ... import _C

# Objects that were made since the last collection. Above it, all that exist are listed
# once, where each generator that a replay makes would look at these.
_MANY_YOUNG = 20_000


class Before:
    """The iterators, generators and open files that exist when it is made.

    They are not listed, of which a large program has many: the collector knows what is
    made since, unless it is switched off or hardly ever runs. (A program that takes all
    functions out of `gc.callbacks` within a run loses that: some of what the run itself
    makes then counts as there before.)

    Args:
        held: Those among them that the code which is run reads from variables. They
            are looked at and put back afterwards; others may be another thread's.

    Attributes:
        listed: All of them by their identities, where they had to be listed; else None.
    """

    def __init__(self, held: Iterable[Any] = ()) -> None:
        self.listed: dict[int, Any] | None = None
        self._objects: _C.ObjectsBefore | None = None
        if gc.isenabled() and gc.get_count()[0] <= _MANY_YOUNG:
            self._objects = _C.ObjectsBefore(_gives_items)
            on_collection = self._objects.on_collection
            gc.callbacks.append(on_collection)
            end = weakref.finalize(self, _forget, on_collection)
            end.atexit = False
        else:
            self.listed = {id(each): each for each in _C.collected(_gives_items)}
        self._states: list[tuple[Any, Any]] = []
        self._held = [each for each in held if place_of(each) is not None]

    def has(self, value: Any) -> bool:
        """True for one of them that the collector knows, which ranges are not."""
        if self._objects is not None:
            return self._objects.has(value)
        return self.listed is not None and self.listed.get(id(value)) is value

    def note(self) -> None:
        """Notes how far iterators are."""
        self._states = [(each, place_of(each)) for each in self._held]

    def put_back(self) -> bool:
        """Puts iterators back that were taken from unseen; True if any was."""
        taken = [(e, place) for e, place in self._states if place_of(e) != place]
        for each, place in taken:
            if hasattr(each, "__setstate__") and isinstance(place, tuple):
                each.__setstate__(place[-1])
        self._states = []
        return bool(taken)


def _forget(on_collection: Any) -> None:
    with contextlib.suppress(ValueError):  # the program has emptied the list
        gc.callbacks.remove(on_collection)


def _gives_items(kind: type) -> bool:
    """True for iterators, generators, coroutines and files."""
    if kind.__module__ in ("builtins", "itertools", "_io", "_csv", "types"):
        return hasattr(kind, "__next__") or hasattr(kind, "cr_code")
    is_torchs = kind.__module__ == "torch.utils.data.dataloader"
    is_loader = is_torchs and hasattr(kind, "__next__")
    return is_loader or issubclass(kind, io.IOBase)


def place_of(value: Any) -> Any:
    """How far an iterator of a list, a tuple and such is; None where it is not seen."""
    kind = type(value)
    if kind.__module__ != "builtins" or not hasattr(kind, "__length_hint__"):
        return None
    if hasattr(kind, "__setstate__"):
        return operator.length_hint(value), *value.__reduce__()[2:]
    return operator.length_hint(value)
