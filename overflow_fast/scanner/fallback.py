"""Stands for the compiled extension where there is none that fits.

`scan` and `assert_finite_state` then use torch operations. The guard, the detector and
replays need the extension, and refuse with the way to get it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from types import ModuleType
from typing import Any, NoReturn

import torch

from ..torch_internals.tensor_internals import is_in_transform, is_zero_tensor
from .text import dtype_name

# The enumerations of the extension, with its names.


class Readability(Enum):
    """The reasons why a tensor's memory cannot be read."""

    READABLE = 0
    UNSUPPORTED = 1
    FREED = 2
    WRAPPER = 3


class EntryKind(Enum):
    """The kinds of entries of a frame."""

    TENSOR = 0
    NONE = 1
    NOT_TENSOR = 2
    NOT_SCANNED = 3


class Role(Enum):
    """The roles of entries in their frames."""

    INPUT = 0
    OUTPUT = 1
    GRAD_OUTPUT = 2
    WEIGHT = 3
    BUFFER = 4
    GRADIENT = 5
    OPTIMIZER_STATE = 6
    RECORDED = 7


class LabelStyle(IntEnum):
    """The text of a part of a label."""

    NAME = 0
    INDEX = 1
    KEY = 2
    ATTRIBUTE = 3


class FrameKind(Enum):
    """The kinds of frames, by the tensors that they list."""

    FORWARD = 0
    RECOMPUTED = 1
    BACKWARD = 2
    RECORDED = 3
    WEIGHTS = 4
    BUFFERS = 5
    GRADIENTS = 6
    OPTIMIZER_STATE = 7


class ScanBackend(Enum):
    """The ways to scan; here always torch operations."""

    AUTO = 0
    COMPOSITE = 1
    DEVICE = 2


# Kinds of non-finite values, as bits.
POSITIVE_INF = 1
NEGATIVE_INF = 2
NAN = 4


# Scans by torch operations alone, with the stats of the kernels. Finite floats take 6
# times as long as with the CPU's kernels if they are many (64 MB of float32), and 10 us
# for each small tensor in place of 0.1 us.


# Elements that are converted at once; their counts are exact in float32.
_PIECE = 1 << 22
_INFINITY = float("inf")
_UNSIGNED = {torch.uint64: 64, torch.uint32: 32, torch.uint16: 16, torch.uint8: 8}
_SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8)
FLOATS = {
    torch.float64: torch.float64,
    **dict.fromkeys(
        (
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.float8_e4m3fnuz,
            torch.float8_e5m2fnuz,
            torch.float8_e8m0fnu,
        ),
        torch.float32,
    ),
}
COMPLEX = (torch.complex128, torch.complex64, torch.complex32)
_KNOWN = {torch.bool, *_UNSIGNED, *_SIGNED, *FLOATS, *COMPLEX}


@dataclass
class TorchStat:
    """The stat of one tensor; see `overflow_fast.Stat`."""

    abs_min: float | None = None
    abs_max: float | None = None
    num_nan: int = 0
    num_inf: int = 0
    nonfinite_kinds: int = 0

    def take(self, other: TorchStat) -> None:
        """Combines the stat of another part of the tensor with this one."""
        if self.abs_min is None or self.abs_max is None:
            self.abs_min, self.abs_max = other.abs_min, other.abs_max
        elif other.abs_min is not None and other.abs_max is not None:
            is_nan = self.abs_max != self.abs_max or other.abs_max != other.abs_max
            nan = float("nan")
            self.abs_min = nan if is_nan else min(self.abs_min, other.abs_min)
            self.abs_max = nan if is_nan else max(self.abs_max, other.abs_max)
        self.num_nan += other.num_nan
        self.num_inf += other.num_inf
        self.nonfinite_kinds |= other.nonfinite_kinds


def readability(tensor: torch.Tensor) -> Readability:
    """Finds whether a tensor's own memory can be read."""
    if (
        type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        or tensor.layout is not torch.strided
        or tensor.is_meta
        or tensor.is_quantized
        or is_in_transform(tensor)
        or is_zero_tensor(tensor)
    ):
        return Readability.WRAPPER
    if tensor.dtype not in _KNOWN:
        return Readability.UNSUPPORTED
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in pairs)
    has_memory = tensor.untyped_storage().nbytes() >= (last + 1) * tensor.itemsize
    return (
        Readability.READABLE if has_memory or not tensor.numel() else Readability.FREED
    )


def scan_tensors(
    tensors: list[torch.Tensor], backend: ScanBackend = ScanBackend.AUTO
) -> list[TorchStat | Readability | str]:
    """Returns for each tensor its stat, or why there is none. Incurs syncs for each."""
    return [scan_tensor(tensor) for tensor in tensors]


def scan_tensor(tensor: torch.Tensor) -> TorchStat | Readability | str:
    """Returns its stat, or why there is none. Incurs a sync for each piece."""
    found = readability(tensor)
    if found is not Readability.READABLE:
        return found
    stat = TorchStat()
    try:
        with torch.no_grad():
            for piece in _pieces(_memory_of(tensor.detach())):
                stat.take(_scan_piece(piece))
    except Exception as error:  # a device without one of the operations
        text = str(error).partition("\n")[0]
        return f"{tensor.dtype} on {tensor.device.type}: {text}"
    return stat


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements as they lie in memory: expanded dimensions once."""
    tensor = tensor.resolve_conj().resolve_neg()
    for dim in reversed(range(tensor.dim())):
        if tensor.stride(dim) == 0 and tensor.size(dim) > 1:
            tensor = tensor.select(dim, 0)
    return tensor


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.numel() <= _PIECE:
        if tensor.numel():
            yield tensor
        return
    longest = max(range(tensor.dim()), key=tensor.size)
    for half in tensor.chunk(2, longest):
        yield from _pieces(half)


def _scan_piece(piece: torch.Tensor) -> TorchStat:
    if piece.dtype in COMPLEX:
        return _scan_complex(torch.view_as_real(piece))
    if piece.dtype in FLOATS:
        values = piece.to(FLOATS[piece.dtype])
        low, high = torch.stack(values.abs().aminmax()).tolist()
        if high < _INFINITY:  # false for nan
            return TorchStat(low, high)
        is_nan = values.isnan()
        positive, negative = values == _INFINITY, values == -_INFINITY
        return _stat(values.abs(), is_nan, positive | negative, positive, negative)
    if piece.dtype in _UNSIGNED or piece.dtype == torch.bool:
        return _scan_unsigned(piece)
    values = piece.to(torch.int64)
    low, high = values.amin().item(), values.amax().item()
    # ~x is -x - 1: without the overflow of the most negative number.
    least = torch.where(values < 0, ~values, values)
    near = min(_nearest(least, values < 0, 1), _nearest(least, values >= 0, 0))
    return TorchStat(near, max(abs(low), abs(high)))


def _nearest(magnitudes: torch.Tensor, which: torch.Tensor, more: int) -> int | float:
    """Returns the smallest of those of one sign; inf if there are none."""
    chosen = magnitudes[which]
    return int(chosen.amin()) + more if chosen.numel() else _INFINITY


def _scan_unsigned(piece: torch.Tensor) -> TorchStat:
    if piece.dtype is torch.uint64:  # few operations know it: as int64, in its order
        top = torch.iinfo(torch.int64).min
        values = piece.view(torch.int64) ^ top
        return TorchStat(int(values.amin()) - top, int(values.amax()) - top)
    values = piece.to(torch.int64)
    return TorchStat(int(values.amin()), int(values.amax()))


def _scan_complex(parts: torch.Tensor) -> TorchStat:
    """Scans moduli: in float64 where the parts are narrower, rounded once."""
    real, imaginary = parts.to(torch.float64).unbind(-1)
    if parts.dtype is torch.float64:
        moduli = torch.hypot(real, imaginary)
    else:
        moduli = (real * real + imaginary * imaginary).sqrt().to(parts.dtype)
        moduli = moduli.to(torch.float32)
    is_nan = parts.isnan().any(-1)
    positive, negative = (parts == _INFINITY).any(-1), (parts == -_INFINITY).any(-1)
    is_inf = positive | negative
    moduli = moduli.masked_fill(is_nan, float("nan")).masked_fill(is_inf, _INFINITY)
    return _stat(moduli, is_nan, is_inf, positive, negative)


def _stat(
    magnitudes: torch.Tensor,
    is_nan: torch.Tensor,
    is_inf: torch.Tensor,
    positive: torch.Tensor,
    negative: torch.Tensor,
) -> TorchStat:
    counts = [mask.sum().to(magnitudes.dtype) for mask in (is_nan, is_inf)]
    signs = [mask.any().to(magnitudes.dtype) for mask in (positive, negative)]
    ends = [magnitudes.amin(), magnitudes.amax()]
    low, high, nans, infs, up, down = torch.stack([*ends, *counts, *signs]).tolist()
    kinds = POSITIVE_INF * bool(up) | NEGATIVE_INF * bool(down) | NAN * bool(nans)
    return TorchStat(low, high, int(nans), int(infs), kinds)


# A recorder of named tensors, which is all that `assert_finite_state` needs.


_log = logging.getLogger("overflow_fast")
_ROLES = {
    FrameKind.WEIGHTS: Role.WEIGHT,
    FrameKind.BUFFERS: Role.BUFFER,
    FrameKind.GRADIENTS: Role.GRADIENT,
    FrameKind.OPTIMIZER_STATE: Role.OPTIMIZER_STATE,
    FrameKind.RECORDED: Role.RECORDED,
}
_orders = itertools.count(1)
# What the package gives the extension; see `core.callbacks`.
callbacks: dict[str, Callable[..., Any]] = {}
why_missing = ["overflow_fast has no extension"]
_NAME = "overflow_fast._C"


def refuse() -> NoReturn:
    """Raises the error of what needs the extension."""
    raise ImportError(
        "The guard, the detector and the replay of a step need overflow_fast's "
        f"extension.\n{why_missing[0]}",
        name=_NAME,
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

    @property
    def is_unseen(self) -> bool:
        """False: it is bad only for what was seen in it."""
        return False


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
        """The number of tensors that were not scanned."""
        return self.counts.total()

    def reasons(self) -> dict[str, int]:
        """The number of tensors that were not scanned, by the reason."""
        return dict(self.counts)

    def opaque(self) -> dict[str, int]:
        """The number of values that were not opened: none, since tensors are given."""
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
        dtype = dtype_name(read.dtype)
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


# The extension's other names.


class Hidden(contextlib.nullcontext[None]):
    """Hides Python code from modes of the user's, which needs the extension."""


class FrameHook:
    """The hook of a module; it is never put on one."""

    def __init__(self, owner: object, module: int) -> None:
        self.owner, self.module = owner, module


def run_hook(*arguments: object) -> None:
    """Records a call of a module, which needs the extension."""
    refuse()


def run_paused(function: Callable[..., Any], /, *arguments: object) -> Any:
    """Calls a function of the package's from a hook, which needs the extension."""
    refuse()


def set_callbacks(**functions: Callable[..., Any]) -> None:
    """Takes the package's functions."""
    callbacks.update(functions)


def has_kernels(type: str) -> bool:
    """True if a device type has kernels: none has."""
    return False


def check_kernels(device: str) -> None:
    """Compares a device's kernels with the CPU's: there are none."""


def unused_kernels() -> dict[str, str]:
    """Returns why kernels of devices are not used: there are none."""
    return {}


def register_scan(type: str, function: object) -> None:
    """Registers the kernel of a device type, which needs the extension."""


def isa() -> str:
    """Names what scans."""
    return "torch operations"


def fallback_module() -> ModuleType:
    """Returns a module with the names of the extension."""
    module = ModuleType(_NAME, __doc__)
    public = {k: v for k, v in globals().items() if not k.startswith("_")}
    module.__dict__.update(public)
    # The package has a class of its own by this name.
    module.__dict__["Stat"] = TorchStat
    return module


def stand_in(why: str) -> ModuleType:
    """Returns a module for the extension's place, and logs why it is needed.

    Args:
        why: what is missing, and how to get it.
    """
    why_missing[0] = why
    _log.warning(
        "%s\nUntil then torch operations scan, which is slower: `scan` and "
        "`assert_finite_state` work; the guard, the detector and replays do not.",
        why,
    )
    return fallback_module()
