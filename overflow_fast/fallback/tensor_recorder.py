"""A recorder of named tensors, which is all that `assert_finite_state` needs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from .enumerations import NEGATIVE_INF, EntryKind, FrameKind, Readability, Role
from .torch_scan import TorchStat, scan_tensor

_ROLES = {
    FrameKind.WEIGHTS: Role.WEIGHT,
    FrameKind.BUFFERS: Role.BUFFER,
    FrameKind.GRADIENTS: Role.GRADIENT,
    FrameKind.OPTIMIZER_STATE: Role.OPTIMIZER_STATE,
    FrameKind.RECORDED: Role.RECORDED,
}
_orders = itertools.count(1)
# What the package gives the extension; see `capture.callbacks`.
callbacks: dict[str, Callable[..., Any]] = {}
why_missing = ["overflow_fast has no extension"]


def refuse() -> NoReturn:
    """Raises the error of what needs the extension."""
    raise ImportError(
        "The guard, the detector and the replay of a step need overflow_fast's "
        f"extension.\n{why_missing[0]}"
    )


@dataclass(frozen=True)
class Label:
    """The name of a recorded tensor."""

    role: Role
    name: str
    parts: tuple[object, ...] = ()


@dataclass(frozen=True)
class Place:
    """The place of an entry."""

    kind: FrameKind
    module: int
    label: Label


@dataclass
class Entry:
    """A recorded tensor and its stat."""

    place: Place
    numel: int
    dtype: str
    stat: TorchStat | None
    reason: str | None
    allowed: int
    only_if_bad: bool = False
    version: int = 0
    is_computed: bool = False

    @property
    def label(self) -> Label:
        """The name of the tensor."""
        return self.place.label

    @property
    def role(self) -> Role:
        """The role of the tensor."""
        return self.label.role

    @property
    def kind(self) -> EntryKind:
        """TENSOR, or NOT_SCANNED."""
        return EntryKind.NOT_SCANNED if self.stat is None else EntryKind.TENSOR

    @property
    def nonfinite_kinds(self) -> int:
        """The kinds of non-finite values that it holds, as bits."""
        return self.stat.nonfinite_kinds if self.stat else 0

    @property
    def is_bad(self) -> bool:
        """True if it holds a non-finite value that is not allowed."""
        return bool(self.nonfinite_kinds & ~self.allowed)


@dataclass
class Frame:
    """The tensors that were recorded together."""

    kind: FrameKind
    batch: int
    entries: list[Entry]
    order: int = field(default_factory=lambda: next(_orders))
    module: int = 0
    class_name: str = ""
    opens_batch: bool = False
    is_recomputed: bool = False

    @property
    def is_bad(self) -> bool:
        """True if one of its entries is bad."""
        return any(entry.is_bad for entry in self.entries)


@dataclass
class StepResults:
    """The bad frames since the last time."""

    bad: list[Frame] = field(default_factory=list)
    before: list[Frame] = field(default_factory=list)
    captured_tensors: object = None


@dataclass
class ScanCounts:
    """Counts of what was scanned and what was not."""

    tensors_listed: int = 0
    tensors_scanned: int = 0
    bytes_scanned: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def not_scanned(self) -> int:
        """How many tensors were not scanned."""
        return self.counts.total()

    def reasons(self) -> dict[str, int]:
        """How many tensors were not scanned, by the reason."""
        return dict(self.counts)

    def opaque(self) -> dict[str, int]:
        """How many values were not looked into: none, since tensors are given."""
        return {}


class Recorder:
    """Scans named tensors when they are recorded.

    Raises:
        ImportError: If the options ask for more than that.
    """

    def __init__(self, max_frames: int | None, **options: bool) -> None:
        if options != {"step_mode": True, "memo": False}:
            refuse()
        self.coverage = ScanCounts()
        self.is_paused = self.in_step = self.is_headroom_spent = False
        self.lists_parameters = True
        self.total_calls = self.last_batch = self.num_sends = 0
        self._rules: Callable[[Place], int] | None = None
        self._results = StepResults()

    @staticmethod
    def num_frames() -> int:
        """Returns a number that no frame so far exceeds."""
        return next(_orders)

    def begin_batch(self, number: int) -> None:
        """Gives the frames that follow their batch."""
        self.last_batch = number

    def set_rules(self, rules: Callable[[Place], int] | None, /) -> None:
        """Sets which non-finite values are allowed where."""
        self._rules = rules

    def record(
        self, kind: FrameKind, names: list[str], tensors: list[torch.Tensor]
    ) -> None:
        """Scans tensors as one frame. Incurs a sync for each."""
        named = zip(names, tensors, strict=True)
        frame = Frame(
            kind, self.last_batch, [self._scan(kind, *each) for each in named]
        )
        if self._rules is not None:
            for entry in frame.entries:
                entry.allowed |= self._rules(entry.place) if entry.is_bad else 0
        if frame.is_bad:
            self._results.bad.append(frame)

    def _scan(self, kind: FrameKind, name: str, tensor: torch.Tensor) -> Entry:
        found, read = scan_tensor(tensor), tensor
        if found is Readability.WRAPPER:
            inner = callbacks["resolve"](tensor)
            read = inner if isinstance(inner, torch.Tensor) else tensor
            found = scan_tensor(read) if read is inner else str(inner)
        if isinstance(found, Readability):
            found = str(callbacks["reason"](read, found))
        self.coverage.tensors_listed += 1
        place = Place(kind, 0, Label(_ROLES[kind], name))
        dtype = str(read.dtype).removeprefix("torch.")
        allowed = NEGATIVE_INF if kind is FrameKind.BUFFERS else 0  # additive masks
        if isinstance(found, str):
            self.coverage.counts[found] += 1
            return Entry(place, 0, dtype, None, found, allowed)
        self.coverage.tensors_scanned += 1
        self.coverage.bytes_scanned += read.nbytes
        return Entry(place, read.numel(), dtype, found, None, allowed)

    def entries(self, frame: Frame) -> list[Entry]:
        """Lists the entries of a frame."""
        return frame.entries

    def take_step_results(self) -> StepResults:
        """Returns the bad frames since the last call."""
        taken, self._results = self._results, StepResults()
        return taken

    def calls(self) -> list[object]:
        """Lists the calls of modules: none is seen."""
        return []

    def last_peak(self, place: Place, /) -> None:
        """Returns the last magnitude at a place: none is kept."""

    def send(self, with_captured: bool = False) -> None:
        """Starts a copy of stats: they are there when `record` returns."""

    def process_arrived(self, *arguments: object) -> None:
        """Processes stats that have arrived: `record` has done so."""

    def set_gradients_wanted(self, is_wanted: bool, /) -> None:
        """Switches hooks on gradients: there are none."""

    def forget_parameters(self) -> None:
        """Forgets which parameters were scanned: none are remembered."""
