"""A replay is compared with the step itself: the first value that differs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .. import _C
from ..capture.watch import ModelWatch
from ..tree import entry_label
from .replayer import Observer


@dataclass(frozen=True)
class Stats:
    """The extremes of an entry in a step.

    Attributes:
        num_tensors: How many tensors they are of.
        abs_min: The smallest magnitude; nan where there is a nan.
        abs_max: The largest magnitude; nan where there is a nan.
        num_nan: The number of nans.
        num_inf: The number of infs.
    """

    num_tensors: int
    abs_min: float
    abs_max: float
    num_nan: int
    num_inf: int


@dataclass(frozen=True)
class Difference:
    """The first entry, in execution order, whose extremes differ.

    Attributes:
        module: The name of its module.
        label: Its label, such as "output" or "grad_output".
        step: Its extremes in the step.
        replay: Those in the replay.
    """

    module: str
    label: str
    step: Stats
    replay: Stats

    def __str__(self) -> str:
        """The difference as a clause."""
        place = f"{self.label} of {self.module or 'the model'}"
        return f"{place} is the first that differs: {self._what()}"

    def _what(self) -> str:
        step, replay = self.step, self.replay
        for kind in ("nan", "inf"):
            numbers = (getattr(step, f"num_{kind}"), getattr(replay, f"num_{kind}"))
            if numbers[0] != numbers[1]:
                return f"{numbers[0]} {kind} in the step, {numbers[1]} in the replay"
        extreme = "smallest" if step.abs_max == replay.abs_max else "largest"
        name = "abs_min" if extreme == "smallest" else "abs_max"
        values = _apart(getattr(step, name), getattr(replay, name))
        return f"{extreme} magnitude {values[0]} in the step, {values[1]} in the replay"


def _apart(one: float, other: float) -> tuple[str, str]:
    """Writes two numbers with as many digits as tell them apart."""
    for digits in (3, 6, 9, 17):
        texts = f"{one:.{digits}g}", f"{other:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


_Key = tuple[str, str, str]  # the module's name, the label, the dtype


class ReplayCheck(Observer):
    """Watches a replay as the step was watched, and compares their extremes.

    Calls are compared, and the gradients of their outputs. Gradients of parameters are
    not: what clips, unscales and reduces them runs after what is replayed.

    Args:
        watches: The watches of the step, whose recorders note their rows.
        make_watches: Makes watches alike.
    """

    def __init__(
        self,
        watches: Sequence[ModelWatch],
        make_watches: Callable[[], list[ModelWatch]],
    ) -> None:
        self._step = {kind: _stats_of(watches, kind) for kind in _KINDS}
        self._replay = {kind: dict[_Key, Stats]() for kind in _KINDS}
        self._make_watches = make_watches

    @contextlib.contextmanager
    def observing(self, models: Mapping[str, nn.Module]) -> Iterator[None]:
        """Watches what runs within. Its own errors leave it without a comparison."""
        watches = self._attached()
        try:
            yield
        finally:
            with contextlib.suppress(Exception):
                for watch in watches:
                    watch.frames.send()
                    watch.frames.receive(is_lagged=False)
                self._replay = {kind: _stats_of(watches, kind) for kind in _KINDS}
            for watch in watches:
                watch.detach()

    def _attached(self) -> list[ModelWatch]:
        if not any(self._step.values()):
            return []
        watches = []
        with contextlib.suppress(Exception):
            watches = self._make_watches()
            for watch in watches:
                watch.recorder.note_row()
                watch.attach()
        return watches

    def difference(self) -> Difference | None:
        """The first value that differs from the step's, in execution order."""
        forward = self._differing(_C.FrameKind.FORWARD)
        if any(forward):
            return next(filter(None, forward))
        backward = self._differing(_C.FrameKind.BACKWARD)
        # If the first differs, so may what the two backwards began with.
        is_given_alike = bool(backward) and backward[0] is None
        return next(filter(None, backward), None) if is_given_alike else None

    def _differing(self, kind: _C.FrameKind) -> list[Difference | None]:
        """For each entry of both: how it differs, or None."""
        step = self._step[kind]
        return [
            None
            if _are_same(step[key], stats)
            else Difference(key[0], key[1], step[key], stats)
            for key, stats in self._replay[kind].items()
            if key in step and step[key].num_tensors == stats.num_tensors
        ]


_KINDS = (_C.FrameKind.FORWARD, _C.FrameKind.BACKWARD)


def _stats_of(watches: Sequence[ModelWatch], kind: _C.FrameKind) -> dict[_Key, Stats]:
    """The extremes that recorders have noted, by their place, in execution order."""
    found = {}
    for watch in watches:
        row = watch.recorder.running_row()
        columns = watch.recorder.row_columns(0)[: row.num_entries]
        for column, stats in zip(columns, _rows(row), strict=True):
            if column.place.kind == kind and stats.num_tensors:
                name = watch.name_at(column.place.module)
                found[name, entry_label(column.place), column.dtype] = stats
    return found


def _rows(row: _C.StepRow) -> Iterator[Stats]:
    num = row.num_entries
    columns = [
        _numbers(row.num_tensors, num),
        *(_magnitudes(each, num) for each in (row.abs_min, row.abs_max)),
        *(_numbers(each, num) for each in (row.num_nan, row.num_inf)),
    ]
    for values in zip(*columns, strict=True):
        yield Stats(*values)


def _numbers(packed: bytes, num: int) -> list[int]:
    if not packed:
        return [0] * num
    return torch.frombuffer(bytearray(packed), dtype=torch.int64).tolist()


def _magnitudes(packed: bytes, num: int) -> list[float]:
    if not packed:
        return [math.nan] * num
    dtype = torch.float32 if len(packed) == 4 * num else torch.float64
    return torch.frombuffer(bytearray(packed), dtype=dtype).tolist()


def _are_same(one: Stats, other: Stats) -> bool:
    counts = [(each.num_nan, each.num_inf) for each in (one, other)]
    if counts[0] != counts[1]:
        return False
    pairs = (one.abs_min, other.abs_min), (one.abs_max, other.abs_max)
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs)
