"""The trained weights of a model: which of them forwards write to."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence, Set

import torch
from torch import nn

from ... import _C
from ...scanner.tensors import copy_tensors
from ...torch_internals.module_internals import PARAMETERS
from .tensors import SMALL, is_same_bits, num_bytes, write

Slot = tuple[int, str, str]  # a module's id, its table, the name there


class KeptWeights:
    """The trained weights of a model: which of them forwards write to."""

    def __init__(self) -> None:
        self._owners: list[tuple[weakref.ref[nn.Module], str]] = []
        self._weights: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._copies: dict[int, torch.Tensor] = {}  # by their places in the list
        self._written: set[int] = set()  # in this step
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}  # in any step, by id

    def set(self, found: Sequence[tuple[nn.Module, str, torch.Tensor]]) -> None:
        """Sets which weights there are."""
        self._owners = [(weakref.ref(module), name) for module, name, _ in found]
        self._weights = [weight for _, _, weight in found]
        self._copies, self._written, self._versions = {}, set(), []

    def take(self, is_full: bool) -> None:
        """Copies the small ones, or only those that forwards write to."""
        self._written, self._versions = set(), []
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
        if self._versions and versions != self._versions:
            pairs = enumerate(zip(versions, self._versions, strict=True))
            for place in [place for place, (now, before) in pairs if now != before]:
                self._copies.pop(place, None)
        self._versions = versions

    def end_forward(self) -> None:
        """Notes what the forward has written to."""
        versions = _C.versions_of(self._weights)
        if versions == self._versions or not self._versions:
            return
        pairs = enumerate(zip(versions, self._versions, strict=True))
        for place in [place for place, (now, before) in pairs if now != before]:
            weight = self._weights[place]
            self._written.add(place)
            self._known[id(weight)] = weakref.ref(weight)
        self._versions = versions

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
        if not self._versions:  # no forward has begun
            return []
        versions = _C.versions_of(self._weights) if self._copies else []
        asked = [i for i in self._copies if versions[i] == self._versions[i]]
        silent = {
            i for i in asked if not is_same_bits(self._copies[i], self._weights[i])
        }
        return sorted(self._written | silent)

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The weights that are copied, and what was in them."""
        return [(self._weights[place], copy) for place, copy in self._copies.items()]

    def written(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Those of `pairs()` that this step's forward has written to.

        Incurs a CPU-GPU sync for each that it was not seen to write to.
        """
        places = [place for place in self._places_written() if place in self._copies]
        return [(self._weights[place], self._copies[place]) for place in places]

    def restore(self) -> Iterator[tuple[nn.Module | None, str, str]]:
        """Restores what forwards have written to; yields why one stays changed."""
        self._put_in_place()
        for place in self._places_written():
            reference, name = self._owners[place]
            why = ""
            if place in self._copies:
                write(self._weights[place], self._copies[place])
            else:
                why = "the forward wrote to it, and what it held before is not known"
            yield reference(), name, why

    def _put_in_place(self) -> None:
        """Puts weights back that a forward has replaced by others."""
        for weight, (reference, name) in zip(self._weights, self._owners, strict=True):
            module = reference()
            table = {} if module is None else module.__dict__[PARAMETERS]
            now = table.get(name)
            if now is not weight and type(now) is type(weight) is nn.Parameter:
                table[name] = weight


def _is_small(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and 0 < num_bytes(tensor) <= SMALL
