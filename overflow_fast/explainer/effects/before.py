"""The iterators, generators and files that are there before a replay.

A replay may take from those of its own, and from none of these.
"""

from __future__ import annotations

import io
import itertools
import operator
import types
from collections.abc import Iterable
from typing import Any

from ... import _C


class Before:
    """The iterators, generators and open files that exist when it is made.

    Args:
        held: Those among them that the code which is run reads from variables. They
            are looked at and put back afterwards; others may be another thread's.

    Attributes:
        codes: The code of generators among them.
    """

    def __init__(self, held: Iterable[Any] = ()) -> None:
        self._objects: dict[int, Any] = {}
        self._generators: dict[types.CodeType, list[Any]] = {}
        self._states: list[tuple[Any, Any]] = []
        self._around: set[int] = set()
        for each in _C.collected(_gives_items):
            self._objects[id(each)] = each
            code = getattr(each, "gi_code", None) or getattr(each, "cr_code", None)
            if isinstance(code, types.CodeType):
                self._generators.setdefault(code, []).append(each)
        self.codes = self._generators.keys()
        self._held = [each for each in held if place_of(each) is not None]

    def has(self, value: Any) -> bool:
        """True for one of them that the collector knows, which ranges are not."""
        return id(value) in self._objects and self._objects[id(value)] is value

    def is_running(self, code: types.CodeType) -> bool:
        """True if a generator with a code, of those that were there, goes on now."""
        own = self._generators.get(code, ())
        return any(_runs(each) and id(each) not in self._around for each in own)

    def note(self) -> None:
        """Notes how far iterators are, and which generators the run is called in."""
        generators = itertools.chain.from_iterable(self._generators.values())
        self._around = {id(each) for each in generators if _runs(each)}
        self._states = [(each, place_of(each)) for each in self._held]

    def put_back(self) -> bool:
        """Puts iterators back that were taken from unseen; True if any was."""
        taken = [(e, place) for e, place in self._states if place_of(e) != place]
        for each, place in taken:
            if hasattr(each, "__setstate__") and isinstance(place, tuple):
                each.__setstate__(place[-1])
        self._states = []
        return bool(taken)


def _runs(generator: Any) -> bool:
    is_running = getattr(generator, "gi_running", False)
    return is_running or bool(getattr(generator, "cr_running", False))


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
