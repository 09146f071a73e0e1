"""The trained weights of a model: which of them forwards write to.

An optimizer writes to weights between steps; a forward hardly ever does: that of an
embedding with `max_norm`, or an initialization by the first batch. So weights are not
copied in each step:

1. Their versions are read before and behind each outermost forward. A weight whose
   version has risen in between was written to by the forward: it is known from then on.
2. When a step begins, the known ones are copied, and in steps 1, 2, 4, 8, ... the small
   ones, too. A copy also shows a write that torch does not count, as by `.data`.
3. What other code has written between two forwards of a step is no beginning any more:
   the copy goes.
4. A step that is undone writes the copies back. A weight that a forward has written to,
   and that has no copy, stays changed, which the report says.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence, Set
from typing import Any

import torch
from torch import nn

from ... import _C
from ...base.tensors import copy_tensors
from ...torch_internals.module_internals import PARAMETERS
from .tensors import SMALL, is_same_bits, num_bytes, write

Slot = tuple[int, str, str]  # a module's id, its table, the name there


class KeptWeights:
    """The trained weights of a model: which of them forwards write to.

    Attributes:
        is_rewritten: Other code was seen to write to one between two forwards that are
            judged together.
    """

    def __init__(self) -> None:
        self._owners: list[tuple[weakref.ref[nn.Module], str]] = []
        self._weights: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._copies: dict[int, torch.Tensor] = {}  # by their places in the list
        self._written: set[int] = set()  # in this step
        self._placed: dict[int, Any] = {}  # the tensors seen last in place of others
        self._replaced: set[int] = set()  # by a forward
        self._is_running = False  # a forward is
        self._is_first = True  # no forward has begun that is not judged yet
        self.is_rewritten = False
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}  # in any step, by id

    def set(self, found: Sequence[tuple[nn.Module, str, torch.Tensor]]) -> None:
        """Sets which weights there are."""
        self._owners = [(weakref.ref(module), name) for module, name, _ in found]
        self._weights = [weight for _, _, weight in found]
        self._copies, self._written, self._versions = {}, set(), []

    def take(self, is_full: bool) -> None:
        """Copies the small ones, or only those that forwards write to."""
        self._written, self._versions = set(), []
        self._placed, self._replaced = {}, set()
        self._is_running = False
        self.end_judgement()
        if not (is_full or self._known):  # most steps
            self._copies = {}
            return
        places = [
            place
            for place, weight in enumerate(self._weights)
            if self.is_known(weight) or (is_full and _is_small(weight))
        ]
        earlier = [self._copies.get(place) for place in places]
        copies = copy_tensors([self._weights[place] for place in places], earlier)
        self._copies = dict(zip(places, copies, strict=True))

    def begin_forward(self) -> None:
        """Notes the versions before a forward.

        What was written to between two forwards of a step, as by an optimizer whose
        closure is called several times, is not as the step began any more.
        """
        versions = _C.versions_of(self._weights)
        if self._versions:
            for place in (*self._counted(versions), *self._silent(versions)):
                self._copies.pop(place, None)
                self.is_rewritten |= not self._is_first
        self._versions, self._is_running, self._is_first = versions, True, False

    def end_judgement(self) -> None:
        """Forgets whether other code has written to one: what did is judged."""
        self.is_rewritten, self._is_first = False, True

    def were_rewritten(self) -> bool:
        """True if other code was seen to write to one since the first forward began.

        Incurs a CPU-GPU sync for each weight that is copied.
        """
        if self._is_running or not self._versions:
            return self.is_rewritten
        versions = _C.versions_of(self._weights)
        found = self._counted(versions) or self._silent(versions, waits=True)
        return self.is_rewritten or bool(found)

    def _counted(self, versions: list[int]) -> list[int]:
        """The places of those that torch has counted a write to since."""
        if versions == self._versions:
            return []
        pairs = enumerate(zip(versions, self._versions, strict=True))
        return [place for place, (now, before) in pairs if now != before]

    def _silent(self, versions: list[int], waits: bool = False) -> list[int]:
        """The places of those that are copied, and were written to as by `.data`.

        Those that a forward has written to are others than their copies anyway.

        Args:
            versions: Those of now.
            waits: Also of those on a device, for which the host waits; in clean steps
                it must not, and who has written to these is not known.
        """
        asked = self._copies.keys() - self._written
        asked = {
            place
            for place in asked
            if versions[place] == self._versions[place]
            if waits or self._weights[place].is_cpu
        }
        is_on_device = any(self._weights[place].is_cuda for place in asked)
        if is_on_device and torch.cuda.is_current_stream_capturing():
            return []  # a capture may not be waited for
        return [
            place
            for place in asked
            if not is_same_bits(self._copies[place], self._weights[place])
        ]

    def end_forward(self) -> None:
        """Notes what the forward has written to. Does not incur a CPU-GPU sync."""
        versions = _C.versions_of(self._weights)
        if not self._versions:
            return
        silent = self._silent(versions) if self._is_running else []
        for place in self._counted(versions):
            weight = self._weights[place]
            self._written.add(place)
            self._known[id(weight)] = weakref.ref(weight)
        self._written.update(silent)
        self._versions, self._is_running = versions, False

    def take_over(self, changed: Set[Slot]) -> None:
        """Leaves what other code than a forward has written as it is.

        Args:
            changed: What it has written to.
        """
        for place, (reference, name) in enumerate(self._owners):
            module = reference()
            if module is None or (id(module), PARAMETERS, name) not in changed:
                continue
            weight = self._weights[place] = module.__dict__[PARAMETERS][name]
            self._copies.pop(place, None)
            if self.is_known(weight) or _is_small(weight):  # a forward may follow
                (self._copies[place],) = copy_tensors([weight], [None])
            self._written.discard(place)
        if self._versions:
            self._versions = _C.versions_of(self._weights)

    def is_known(self, weight: torch.Tensor) -> bool:
        """True if a forward was seen to write to it."""
        known = self._known.get(id(weight))
        return known is not None and known() is weight

    def is_written(self, weight: torch.Tensor) -> bool:
        """True if this step's forward has written to it."""
        return any(self._weights[place] is weight for place in self._places_written())

    def _places_written(self) -> list[int]:
        """The places of those that were written to; by `.data`, no version tells."""
        if not self._is_running:  # else an exception may have left it
            return sorted(self._written)
        silent = self._silent(_C.versions_of(self._weights), waits=True)
        return sorted(self._written.union(silent))

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The weights that are copied, and what was in them."""
        return [(self._weights[place], copy) for place, copy in self._copies.items()]

    def written(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Those of `pairs()` that this step's forward has written to.

        Incurs a CPU-GPU sync for each that is copied, where it has not ended.
        """
        places = [place for place in self._places_written() if place in self._copies]
        return [(self._weights[place], self._copies[place]) for place in places]

    def restore(self) -> Iterator[tuple[nn.Module | None, str, str]]:
        """Restores what forwards have written to; yields why one stays changed."""
        for place in self._replaced:
            self._table(place)[self._owners[place][1]] = self._weights[place]
        for place in self._places_written():
            reference, name = self._owners[place]
            why = ""
            if place in self._copies:
                write(self._weights[place], self._copies[place])
            else:
                why = "the forward wrote to it, and what it held before is not known"
            yield reference(), name, why

    def note_placed(self, by_forward: bool) -> None:
        """Notes who has put other tensors in the places of weights.

        Args:
            by_forward: A forward, those that were not seen there last; else other code.
        """
        for place, weight in enumerate(self._weights):
            now = self._table(place).get(self._owners[place][1])
            if now is self._placed.get(place, weight):
                continue
            self._placed[place] = now
            is_plain = type(now) is type(weight) is nn.Parameter
            if by_forward and is_plain and now is not weight:
                self._replaced.add(place)
            else:
                self._replaced.discard(place)

    def _table(self, place: int) -> dict[str, Any]:
        module = self._owners[place][0]()
        table: dict[str, Any] = {} if module is None else module.__dict__[PARAMETERS]
        return table


def _is_small(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and 0 < num_bytes(tensor) <= SMALL
