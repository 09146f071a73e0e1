"""Runs two functions in turns, tensor by tensor, so that nothing has to be stored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..state.random import RandomStates
from .judged_rows import coarser
from .matching import Pair, mapped_name
from .measures import Measures, measured
from .places_of import BACKWARD, Place
from .run_reader import Source
from .run_rows import Row
from .summary import fetch, summarize, values_of
from .whole import Entry


@dataclass
class _Shown:
    """A tensor that waits for its twin: its values only as long as its side waits."""

    entry: Entry
    values: torch.Tensor | None


class Lockstep:
    """Two sides, of which one runs at a time; each hands over at a tensor without twin.

    Args:
        names: Patterns of module names of the first side, and what the other has.
        devices: The devices whose random states belong to a side.
        is_serial: Whether backward is run by each side in one go: autograd has one
            thread for each GPU, which must not wait.

    Attributes:
        pairs: The pairs that were compared, with their measures.
        left: What has no twin yet, of each side.
    """

    def __init__(
        self, names: Mapping[str, str], devices: list[torch.device], is_serial: bool
    ) -> None:
        self._names, self._devices, self._is_serial = names, devices, is_serial
        self._condition = threading.Condition()
        self._turn = 0
        self._done = [False, False]
        self._random = [RandomStates(devices)] * 2
        self._waiting: tuple[dict[object, _Shown], dict[object, _Shown]] = ({}, {})
        self._numbers = [0, 0]
        self.pairs: list[tuple[Pair, Measures | None]] = []

    @property
    def left(self) -> tuple[list[Entry], list[Entry]]:
        """The entries of both sides that have found no twin."""
        first, second = self._waiting
        return [s.entry for s in first.values()], [s.entry for s in second.values()]

    def sink(self, side: int) -> Callable[[Place, torch.Tensor, int | None], None]:
        """Returns what a `Tap` of a side calls with each tensor."""
        return lambda place, tensor, same: self._show(side, place, tensor, same)

    def run(self, side: int, function: Callable[[], None]) -> None:
        """Runs a side in this thread; both have to be run at the same time."""
        self._wait(side)
        try:
            function()
        finally:
            with self._condition:
                self._done[side] = True
                self._pass_on(side)

    def _show(
        self, side: int, place: Place, tensor: torch.Tensor, same: int | None
    ) -> None:
        entry, values = self._entry(side, place, tensor, same)
        name = place.module if side else mapped_name(place.module, self._names)
        key = name, place.call, place.role, place.path
        twin = self._waiting[1 - side].pop(key, None)
        if twin is not None:
            mine = _Shown(entry, values)
            _summarize(mine, twin)
            pair = (twin, mine) if side else (mine, twin)
            self.pairs.append((Pair(pair[0].entry, pair[1].entry), _measures(*pair)))
            return
        shown = self._waiting[side][key] = _Shown(entry, values)
        if place.phase != BACKWARD or not self._is_serial:
            with self._condition:
                self._pass_on(side)
            self._wait(side)
        if shown.values is not None and entry.summary is None:
            entry.summary = fetch([summarize(shown.values)])[0]
        shown.values = None  # from now on it may be written over

    def _entry(
        self, side: int, place: Place, tensor: torch.Tensor, same: int | None
    ) -> tuple[Entry, torch.Tensor | None]:
        order = self._numbers[side]
        self._numbers[side] += 1
        dtype, shape = str(tensor.dtype)[6:], tuple(tensor.shape)
        row = Row(place, order, dtype, shape, same=same)
        entry = Entry(place, order, None, dtype, shape, None, "", [Source(0, row)])
        entry.same = same
        values = values_of(tensor)
        if isinstance(values, str):
            entry.why = str(values)
            return entry, None
        return entry, values

    def _pass_on(self, side: int) -> None:
        """Gives the turn to the other side, unless it has ended."""
        if self._turn == side and not self._done[1 - side]:
            self._random[side] = RandomStates(self._devices)
            self._random[1 - side].restore()
            self._turn = 1 - side
            self._condition.notify_all()

    def _wait(self, side: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._turn == side)


def _summarize(*pair: _Shown) -> None:
    """Finds the ranges and norms of two tensors; equal ones are read once."""
    for shown in pair:
        values, first = shown.values, pair[0]
        if values is None or shown.entry.summary is not None:
            continue
        if shown is not first and _is_equal(first.values, values):
            shown.entry.summary = first.entry.summary
        else:
            numbers = summarize(values, has_sums=pair[1].values is None)
            shown.entry.summary = fetch([numbers])[0]


def _is_equal(first: torch.Tensor | None, second: torch.Tensor) -> bool:
    if first is None or first.dtype != second.dtype or first.shape != second.shape:
        return False
    return first.device == second.device and torch.equal(first, second)


def _measures(mine: _Shown, its: _Shown) -> Measures | None:
    """Exact measures, if the values of both are there."""
    if mine.values is None or its.values is None:
        return None
    if mine.values.numel() != its.values.numel():
        return None
    dtype = coarser(mine.entry.dtype, its.entry.dtype)
    return measured(mine.values, its.values, dtype)
