"""Kinds of non-finite values of tensors, and their magnitudes, by the fused scan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from .. import _C
from ..base.tensors import PLAIN, kinds_in, real_parts, signs_of, widened
from ..base.text import dtype_name
from ..base.tree import tensors_in
from ..guard.report.op import TensorSummary
from ..scanner.ops import Stat, scan
from ..torch_internals.replaying import without_torch_function
from ..torch_internals.tensor_internals import is_in_transform, local_part

NAN, POSITIVE_INF, NEGATIVE_INF = _C.NAN, _C.POSITIVE_INF, _C.NEGATIVE_INF
INF = POSITIVE_INF | NEGATIVE_INF


def is_float(tensor: torch.Tensor) -> bool:
    """True if a tensor can hold a nan or an inf, and has memory to look at."""
    dtype = tensor.dtype
    is_number = dtype.is_floating_point or dtype.is_complex
    return is_number and not tensor.is_meta and not is_in_transform(tensor)


def floats_in(value: object) -> list[torch.Tensor]:
    """Lists the tensors of a value that can hold a nan or an inf, and are not empty."""
    found = [value] if type(value) is torch.Tensor else tensors_in(value)
    return [t for t in found if is_float(t) and t.numel()]


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
    return kinds_in(values)


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a class that names its own, or converts, as one of torch's.

    One of a class that has operations of its own stays as it is.
    """
    has_own = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if type(tensor) in PLAIN or has_own:
        return tensor
    with without_torch_function():
        return tensor.detach()


def as_wide(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a plain tensor in a dtype that has all operations, or None."""
    if type(tensor) not in PLAIN:
        tensor = as_plain(local_part(tensor))
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
        return None
    return widened(tensor)


def summary_of(tensor: torch.Tensor, name: str = "") -> TensorSummary:
    """Counts the non-finite values of a tensor. Incurs a CPU-GPU sync."""
    dtype, numel = dtype_name(tensor.dtype), tensor.numel()
    summary = TensorSummary(tuple(tensor.shape), name=name, dtype=dtype, numel=numel)
    values = as_wide(tensor)
    if values is None or not is_float(tensor):
        return summary
    values = real_parts(values)
    finite = values[values.isfinite()].abs()
    return replace(
        summary,
        abs_min=float(finite.min()) if finite.numel() else None,
        abs_max=float(finite.max()) if finite.numel() else None,
        num_nan=int(values.isnan().sum()),
        num_inf=int(values.isinf().sum()),
        signs=signs_of(kinds_in(values)),
    )


Index = tuple[int, ...]


def index_at(place: int, shape: Sequence[int]) -> Index:
    """The index of a value, by its place among all values of a tensor.

    `torch.unravel_index` imports sympy, which takes seconds, in its first call.

    Args:
        place: Its place.
        shape: The tensor's.
    """
    index = list[int]()
    for size in reversed(shape):
        place, last = divmod(place, size)
        index.insert(0, last)
    return tuple(index)


def bad_places(
    tensor: torch.Tensor, nan_alone: bool = False
) -> tuple[Index, Index] | None:
    """The indices of the first and the last non-finite value, or None.

    Incurs a CPU-GPU sync.
    """
    values = as_wide(tensor)
    if values is None:
        return None
    places = (values.isnan() if nan_alone else ~values.isfinite()).nonzero()
    if not len(places):
        return None
    return tuple(places[0].tolist()), tuple(places[-1].tolist())


def sizes_and_bad(
    named: Iterable[tuple[str, torch.Tensor]], masks: bool = True
) -> tuple[dict[str, float], list[str]]:
    """The largest magnitudes of what is finite, and the names of what is not.

    Incurs a CPU-GPU sync.

    Args:
        named: Names and tensors.
        masks: Whether -inf counts.
    """
    floats = {name: t.detach() for name, t in named if is_float(t) and t.numel()}
    sizes, bad = dict[str, float](), []
    for name, stat in zip(floats, scan(floats.values()), strict=True):
        if stat.is_finite and stat.abs_max is not None:
            sizes[name] = stat.abs_max
        elif (stat.has_nan or stat.has_inf) and (
            masks or kinds_of(floats[name], stat) != NEGATIVE_INF
        ):
            bad.append(name)
    return sizes, bad


_Contents = tuple[Any, ...]  # identifies what a tensor holds, within its memory
_Seen = tuple[int, Stat]  # the kinds, and the stat


class Kinds:
    """Looks up which kinds of non-finite values tensors hold.

    A tensor that nobody has written to is scanned once. Incurs a CPU-GPU sync for each
    scan of tensors on a device.

    Args:
        number_of: Returns the number of a tensor's memory; see `Memories`.
    """

    def __init__(self, number_of: Callable[[torch.Tensor], int]) -> None:
        self.number_of = number_of
        self._known: dict[int, dict[_Contents, _Seen]] = {}

    def of(
        self,
        tensors: Sequence[torch.Tensor],
        memory: Mapping[int, int] | None = None,
    ) -> list[_Seen]:
        """The kinds in each tensor, and its stat.

        Kinds are a sum of NAN, POSITIVE_INF and NEGATIVE_INF.

        Args:
            tensors: The tensors.
            memory: The numbers of their memory, by their `id`, where these are known.
        """
        known = memory or {id(each): self.number_of(each) for each in tensors}
        pairs = [(each, known[id(each)]) for each in tensors]
        found = [
            self._known.get(number, {}).get(_contents_of(tensor))
            for tensor, number in pairs
        ]
        new = [place for place, each in enumerate(found) if each is None]
        # What a class of the program's detaches may be a tensor of torch's.
        own = [tensors[place] for place in new]
        plain = [each if type(each) in PLAIN else each.detach() for each in own]
        scanned = scan(plain) if new else ()
        for place, stat in zip(new, scanned, strict=True):
            found[place] = self._remember(*pairs[place], stat)
        return [each for each in found if each is not None]

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Forgets tensors, and others that share their memory: they are scanned again.

        Their version is raised only after this, or never: operators of extensions need
        not raise it.
        """
        for tensor in tensors:
            self._known.pop(self.number_of(tensor), None)

    def _remember(self, tensor: torch.Tensor, number: int, stat: Stat) -> _Seen:
        kinds = kinds_of(tensor, stat) if stat.has_nan or stat.has_inf else 0
        if tensor.is_inference() or tensor.is_neg():
            return kinds, stat
        self._known.setdefault(number, {})[_contents_of(tensor)] = kinds, stat
        return kinds, stat


def _contents_of(tensor: torch.Tensor) -> _Contents:
    """Identifies what a tensor holds until somebody writes to it."""
    own = tensor if type(tensor) in PLAIN else local_part(tensor)
    is_strided = own.layout is torch.strided
    place = (own.stride(), own.storage_offset()) if is_strided else ()
    return _C.version_of(tensor), tensor.dtype, own.shape, *place


_FEW_COLUMNS = 4  # of more than twice as many; chosen, not measured


def bad_columns(tensor: torch.Tensor) -> list[int]:
    """The columns that hold all non-finite values of two rows or more, if few of many.

    Columns are those of the last dimension: features, classes, channels.
    """
    if tensor.dim() < 2 or not tensor.numel():
        return []
    is_bad = ~widened(tensor.detach()).isfinite().flatten(0, -2)
    columns = is_bad.any(0).nonzero().flatten().tolist()
    width, is_of_rows = is_bad.shape[1], int(is_bad.any(1).sum()) > 1
    is_one = len(columns) == 1 < width
    are_few = len(columns) <= _FEW_COLUMNS and width > 2 * _FEW_COLUMNS
    return columns if is_of_rows and (is_one or are_few) else []
