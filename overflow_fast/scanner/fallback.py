"""Stands for the compiled extension where there is none that fits.

`scan` and `assert_finite_state` then use torch operations. The guard, the detector and
replays need the extension, and refuse with the way to get it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum
from types import ModuleType
from typing import Any, NoReturn

import torch

from ..torch_internals.tensor_internals import is_in_transform, is_zero_tensor

# The enumerations of the extension that scans and names of tensors need.


class Readability(Enum):
    """The reasons why a tensor's memory cannot be read."""

    READABLE = 0
    UNSUPPORTED = 1
    FREED = 2
    WRAPPER = 3


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
        return _stat(values.abs(), is_nan, values.isinf())
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
    is_inf = parts.isinf().any(-1)
    moduli = moduli.masked_fill(is_nan, float("nan")).masked_fill(is_inf, _INFINITY)
    return _stat(moduli, is_nan, is_inf)


def _stat(
    magnitudes: torch.Tensor, is_nan: torch.Tensor, is_inf: torch.Tensor
) -> TorchStat:
    counts = [mask.sum().to(magnitudes.dtype) for mask in (is_nan, is_inf)]
    ends = [magnitudes.amin(), magnitudes.amax()]
    low, high, nans, infs = torch.stack([*ends, *counts]).tolist()
    return TorchStat(low, high, int(nans), int(infs))


# Other names of the extension that are used before or without a recorder.


_log = logging.getLogger("overflow_fast")
_NAME = "overflow_fast._C"


class Hidden(contextlib.nullcontext[None]):
    """Hides no code from modes of the user's, which needs the extension."""


def set_callbacks(**functions: Callable[..., Any]) -> None:
    """Takes the functions that a recorder calls: there is none."""


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


class Missing:
    """A name that needs the extension: any call of it, or within it, raises.

    Args:
        why: what is missing, and how to get it.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Missing:
        return self

    def __call__(self, *arguments: object, **options: object) -> NoReturn:
        raise ImportError(
            "The guard, the detector and the replay of a step need overflow_fast's "
            f"extension.\n{self._why}",
            name=_NAME,
        )


def fallback_module(why: str = "overflow_fast has no extension") -> ModuleType:
    """Returns a module with the names of the extension that scans need.

    Args:
        why: what is missing, and how to get it.
    """

    def missing(name: str) -> Missing:
        if name.startswith("__"):  # imports ask for some of these
            raise AttributeError(name)
        return Missing(why)

    module = ModuleType(_NAME, __doc__)
    public = {k: v for k, v in globals().items() if not k.startswith("_")}
    module.__dict__.update(public)
    # The package has a class of its own by this name.
    module.__dict__["Stat"] = TorchStat
    module.__dict__["__getattr__"] = missing
    return module


def stand_in(why: str) -> ModuleType:
    """Returns a module for the extension's place, and logs why it is needed.

    Args:
        why: what is missing, and how to get it.
    """
    _log.warning(
        "%s\nUntil then torch operations scan, which is slower: `scan` and "
        "`assert_finite_state` work; the guard, the detector and replays do not.",
        why,
    )
    return fallback_module(why)
