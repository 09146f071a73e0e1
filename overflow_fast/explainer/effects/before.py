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


class Before:
    """The iterators, generators and open files that exist when it is made.

    They are not listed, of which a large program has many: the collector knows what is
    made since. (A program that takes all functions out of `gc.callbacks` within a run
    loses that: some of what the run itself makes then counts as there before.)

    Args:
        held: Those among them that the code which is run reads from variables. They
            are looked at and put back afterwards; others may be another thread's.
    """

    def __init__(self, held: Iterable[Any] = ()) -> None:
        self._objects = _C.ObjectsBefore(_gives_items)
        on_collection = self._objects.on_collection
        gc.callbacks.append(on_collection)
        end = weakref.finalize(self, _forget, on_collection)
        end.atexit = False
        self._states: list[tuple[Any, Any]] = []
        self._held = [each for each in held if place_of(each) is not None]

    def has(self, value: Any) -> bool:
        """True for one of them that the collector knows, which ranges are not."""
        return self._objects.has(value)

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
