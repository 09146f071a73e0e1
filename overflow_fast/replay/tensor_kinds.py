"""Kinds of non-finite values of tensors, and their magnitudes, by the fused scan."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.multiprocessing import reductions

from .. import _C
from ..core.ops import Stat, scan
from ..torch_internals.tensor_internals import is_in_transform, local_part, storages
from ..tree import tensors_in
from .explanation import TensorSummary

NAN, POSITIVE_INF, NEGATIVE_INF = _C.NAN, _C.POSITIVE_INF, _C.NEGATIVE_INF
INF = POSITIVE_INF | NEGATIVE_INF
_State = tuple[int | None, int, tuple[int, ...], int]


def is_float(tensor: torch.Tensor) -> bool:
    """True if a tensor can hold a nan or an inf, and has memory to look at."""
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return is_number and not tensor.is_meta and not is_in_transform(tensor)


def floats_in(value: object) -> list[torch.Tensor]:
    """Lists the tensors of a value that can hold a nan or an inf, and are not empty."""
    return [t for t in tensors_in(value) if is_float(t) and t.numel()]


class Kinds:
    """Looks up which kinds of non-finite values tensors hold.

    A tensor that nobody has written to is scanned once. Incurs a CPU-GPU sync for each
    scan of tensors on a device.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, _State, int, Stat]] = {}
        self._num_writes: dict[int, int] = {}  # by memory

    def of(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """The kinds in each tensor, as a sum of NAN, POSITIVE_INF and NEGATIVE_INF."""
        found = [self._look_up(tensor) for tensor in tensors]
        new = [t for t, each in zip(tensors, found, strict=True) if each is None]
        if new:
            scanned = iter(scan([tensor.detach() for tensor in new]))
            found = [
                self._remember(tensor, next(scanned)) if each is None else each
                for tensor, each in zip(tensors, found, strict=True)
            ]
        return [each[0] for each in found if each is not None]

    def stat(self, tensor: torch.Tensor) -> Stat:
        """The stat of a tensor."""
        found = self._look_up(tensor)
        if found is None:
            found = self._remember(tensor, scan([tensor.detach()])[0])
        return found[1]

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Forgets tensors, and others that share their memory: they are scanned again.

        Their version is raised only after this, or never: operators of extensions need
        not raise it.
        """
        for tensor in tensors:
            for key in storages(tensor):
                self._num_writes[key] = self._num_writes.get(key, 0) + 1

    def _look_up(self, tensor: torch.Tensor) -> tuple[int, Stat] | None:
        known = self._known.get(id(tensor))
        if known is None or tensor.is_inference() or known[0]() is not tensor:
            return None
        return known[2:] if known[1] == self._state(tensor) else None

    def _remember(self, tensor: torch.Tensor, stat: Stat) -> tuple[int, Stat]:
        kinds = kinds_of(tensor, stat) if stat.has_nan or stat.has_inf else 0
        if not tensor.is_inference():
            reference = weakref.ref(tensor)
            self._known[id(tensor)] = (reference, self._state(tensor), kinds, stat)
        return kinds, stat

    def _state(self, tensor: torch.Tensor) -> _State:
        """Identifies the contents of a tensor until somebody writes to it."""
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        pointer = tensor.data_ptr() if is_plain else 0
        writes = [self._num_writes.get(key, 0) for key in storages(tensor)]
        return _C.version_of(tensor), pointer, tuple(tensor.shape), sum(writes)


def kinds_of(tensor: torch.Tensor, stat: Stat | None = None) -> int:
    """The kinds in a tensor, counted by torch's own operations.

    Args:
        tensor: The tensor.
        stat: Its stat, if it is known: only the sign of infs is not in it.
    """
    values = as_wide(tensor)
    if values is None:
        return 0 if stat is None else NAN * stat.has_nan | INF * stat.has_inf
    if stat is not None and not (stat.has_inf or stat.not_scanned):
        return NAN * stat.has_nan
    parts = torch.view_as_real(values) if values.is_complex() else values
    flags = torch.stack(
        [parts.isnan().any(), (parts == math.inf).any(), (parts == -math.inf).any()]
    ).tolist()
    nan, positive, negative = map(int, flags)
    return NAN * nan | POSITIVE_INF * positive | NEGATIVE_INF * negative


def as_wide(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a plain tensor in a dtype that has all operations, or None."""
    tensor = local_part(tensor)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return None
    if tensor.layout is not torch.strided:
        return None
    values = tensor.detach()
    return (
        values.float()
        if values.is_floating_point() and values.itemsize == 1
        else values
    )


def summary_of(tensor: torch.Tensor, name: str = "") -> TensorSummary:
    """Counts the non-finite values of a tensor. Incurs a CPU-GPU sync."""
    dtype, shape = str(tensor.dtype)[6:], tuple(tensor.shape)
    values = as_wide(tensor)
    if values is None or not is_float(tensor):
        return TensorSummary(dtype, shape, None, None, 0, 0, name)
    values = torch.view_as_real(values) if values.is_complex() else values
    finite = values[values.isfinite()].abs()
    least = float(finite.min()) if finite.numel() else None
    most = float(finite.max()) if finite.numel() else None
    num_nan, num_inf = int(values.isnan().sum()), int(values.isinf().sum())
    signs = inf_signs(values)
    return TensorSummary(dtype, shape, least, most, num_nan, num_inf, name, signs)


def inf_signs(values: torch.Tensor) -> str:
    """The signs of the infs: "+", "-", "+-", or "". Incurs a CPU-GPU sync."""
    values = torch.view_as_real(values) if values.is_complex() else values
    infs = {"+": values.isposinf(), "-": values.isneginf()}
    return "".join(sign for sign, are in infs.items() if are.any())


def first_bad(tensor: torch.Tensor, nan_alone: bool = False) -> tuple[int, ...] | None:
    """The index of the first non-finite value, or None. Incurs a CPU-GPU sync."""
    values = as_wide(tensor)
    if values is None:
        return None
    places = (values.isnan() if nan_alone else ~values.isfinite()).nonzero()
    return tuple(places[0].tolist()) if len(places) else None


def bad_names(named: Iterable[tuple[str, torch.Tensor]], masks: bool) -> list[str]:
    """The names of the tensors that hold a non-finite value. Incurs a CPU-GPU sync.

    Args:
        named: Names and tensors.
        masks: Whether -inf counts.
    """
    floats = [(name, t) for name, t in named if is_float(t) and t.numel()]
    stats = scan([tensor.detach() for _, tensor in floats])
    return [
        name
        for (name, tensor), stat in zip(floats, stats, strict=True)
        if stat.has_nan or stat.has_inf
        if masks or kinds_of(tensor, stat) != NEGATIVE_INF
    ]


# Facts about memory, which hold for every tensor that shares it.


_Fact = TypeVar("_Fact")
_weakly: Any = reductions.StorageWeakRef


class StorageMap(Generic[_Fact]):
    """Maps memory to a fact, until it is freed; given out again, it is other memory."""

    def __init__(self) -> None:
        self._facts: dict[int, tuple[Any, _Fact]] = {}

    def get(self, tensor: torch.Tensor) -> _Fact | None:
        """The fact about a tensor's memory, or None."""
        for key in storages(tensor):
            known = self._facts.get(key)
            if known is not None and not known[0].expired():
                return known[1]
        return None

    def put(self, tensor: torch.Tensor, fact: _Fact) -> None:
        """Notes a fact in place of what there was."""
        for key, storage in storages(tensor).items():
            self._facts[key] = _weakly(storage), fact

    def drop(self, tensor: torch.Tensor) -> None:
        """Forgets the fact about a tensor's memory."""
        for key in storages(tensor):
            self._facts.pop(key, None)
