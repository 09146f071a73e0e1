"""The scan as a function: tensors in, stats out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from .. import _C
from ..base.tensors import NotScanned, reason, resolve
from . import callbacks  # noqa: F401  (scans call them)


class Stat(NamedTuple):
    """The result of one scan of one tensor.

    Attributes:
        abs_min: The smallest magnitude; an int for integer and bool dtypes. nan if any
            element is nan, None if nothing was scanned.
        abs_max: The largest magnitude, likewise.
        has_nan: True if any element is nan, as `torch.isnan` defines it.
        has_inf: True if any element is inf or -inf, as `torch.isinf` defines it.
        numel: The number of elements of the tensor, repeats of expanded ones included.
        dtype: The tensor's dtype.
        not_scanned: The reason why the tensor was not scanned; None if it was.
    """

    abs_min: float | None
    abs_max: float | None
    has_nan: bool
    has_inf: bool
    numel: int
    dtype: torch.dtype
    not_scanned: str | None = None

    @property
    def is_empty(self) -> bool:
        """True if the tensor has no element."""
        return self.numel == 0 and self.not_scanned is None

    @property
    def is_finite(self) -> bool:
        """True if every element was scanned and none is nan or inf."""
        return not (self.has_nan or self.has_inf or self.not_scanned)


def scan(tensors: Iterable[torch.Tensor], *, backend: str = "auto") -> list[Stat]:
    """Scans each tensor once and returns its stat.

    Works for any mix of dtypes, layouts and devices, and makes no copy of a tensor. On
    a device that has no kernel the stats come from torch operations. Magnitudes of
    complex numbers are moduli. The elements of sparse tensors are their values, those
    of a DTensor its local part. A tensor that cannot be scanned (meta, fake, quantized
    tensors, unknown subclasses, dtypes that a device's torch operations do not
    know) gets a stat whose `not_scanned` is the reason.

    Incurs one CPU-GPU sync for each device that holds some of them; none for the CPU.

    Args:
        tensors: Tensors of any shape.
        backend: "auto", or "composite" to use torch operations on every device.

    Returns:
        One stat for each tensor, in order.

    Raises:
        TypeError: If `tensors` is a single tensor or holds something else than tensors.
        ValueError: If `backend` is unknown.

    Example:
        >>> scan([torch.tensor([-2.0, 0.5])])[0].abs_max
        2.0
    """
    if isinstance(tensors, torch.Tensor):
        raise TypeError(
            "tensors must be a list of torch.Tensor, got one Tensor: use scan([tensor])"
        )
    if not isinstance(backend, str) or backend not in _BACKENDS:
        raise ValueError(f"backend must be 'auto' or 'composite', got {backend!r}")
    tensors = list(tensors)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"tensors must hold torch.Tensor only, got {type(tensor).__name__}"
            )
    return scan_with(tensors, _BACKENDS[backend])


def are_nonfinite(tensors: Iterable[torch.Tensor]) -> list[bool]:
    """Scans tensors: True for each that is known to hold a nan or an inf."""
    return [stat.has_nan or stat.has_inf for stat in scan(tensors)]


_BACKENDS = {"auto": _C.ScanBackend.AUTO, "composite": _C.ScanBackend.COMPOSITE}


def scan_with(tensors: list[torch.Tensor], backend: _C.ScanBackend) -> list[Stat]:
    """Scans tensors by one of the extension's backends; see `scan`."""
    scanned = scan_values(tensors, backend)
    return [_stat(*each) for each in zip(tensors, scanned, strict=True)]


class Scanned(NamedTuple):
    """The tensor whose memory was read, and what was found there.

    Attributes:
        tensor: The tensor; of a wrapper, its values.
        stat: Its stat; None if it was not scanned.
        why_not: Why it was not.
    """

    tensor: torch.Tensor
    stat: _C.Stat | None
    why_not: str


def scan_values(
    tensors: list[torch.Tensor], backend: _C.ScanBackend = _C.ScanBackend.AUTO
) -> list[Scanned]:
    """Scans tensors, and the values of wrappers. Incurs a sync for each device."""
    found = _C.scan_tensors(tensors, backend)
    stats = [each for each in found if isinstance(each, _C.Stat)]
    if len(stats) == len(found):  # most
        return [Scanned(*pair, "") for pair in zip(tensors, stats, strict=True)]
    read: list[torch.Tensor | NotScanned] = list(tensors)
    wrappers = [i for i, each in enumerate(found) if each == _C.Readability.WRAPPER]
    for i in wrappers:
        read[i] = resolve(tensors[i])
    opened = {i: each for i in wrappers if not isinstance(each := read[i], NotScanned)}
    results = _C.scan_tensors(list(opened.values()), backend) if opened else []
    for i, result in zip(opened, results, strict=True):
        found[i] = result
    return list(map(_scanned, tensors, read, found))


def _scanned(
    tensor: torch.Tensor,
    read: torch.Tensor | NotScanned,
    found: _C.Stat | _C.Readability | str,
) -> Scanned:
    if isinstance(read, NotScanned):
        return Scanned(tensor, None, read)
    if isinstance(found, _C.Stat):
        return Scanned(read, found, "")
    why = found if isinstance(found, str) else reason(read, found)
    return Scanned(read, None, why)


def _stat(tensor: torch.Tensor, scanned: Scanned) -> Stat:
    numel, dtype, found = _numel(tensor), tensor.dtype, scanned.stat
    if found is None:
        return Stat(None, None, False, False, numel, dtype, str(scanned.why_not))
    has_nan, has_inf = found.num_nan > 0, found.num_inf > 0
    return Stat(found.abs_min, found.abs_max, has_nan, has_inf, numel, dtype)


def _numel(tensor: torch.Tensor) -> int:
    try:
        return tensor.numel()
    except Exception:
        return 0
