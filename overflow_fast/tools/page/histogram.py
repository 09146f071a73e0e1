"""The histogram of an offending tensor by exponent, and where it is not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...base.text import dtype_name
from ...base.types import ValueCounts
from ...guard.files.reading import FileError
from ...guard.files.tensor_files import open_tensors
from .incidents import Incident


@dataclass(frozen=True)
class Histogram(ValueCounts):
    """The magnitudes of one tensor, counted by their exponents of 2.

    Attributes:
        name: The tensor's name, as reports have it.
        shape: Its shape.
        bins: Exponents and counts: `2**exponent <= |x| < 2**(exponent + 1)`.
        lowest: The exponent of the dtype's smallest normal number.
        highest: That of its largest number.
        num_zero: How many are 0.
        places: The places of the first non-finite elements.
        rows: How many non-finite elements each index of the first dimension has.
        is_first: Whether it is the one that the report names.
    """

    name: str
    shape: tuple[int, ...]
    bins: list[tuple[int, int]]
    lowest: int
    highest: int
    num_zero: int
    places: list[tuple[int, ...]]
    rows: list[tuple[int, int]]
    is_first: bool = True

    @property
    def most(self) -> int:
        """The largest count of a bin; at least 1."""
        return max((count for _, count in self.bins), default=1)


_FEW = 8  # places and rows that a page lists; chosen
_CALL = "['call']"
_PARTS = {f"{_CALL}[0]": "input", f"{_CALL}[1]": "input", f"{_CALL}[2]": "output"}


def histogram_of(incident: Incident) -> Histogram | None:
    """Counts a non-finite tensor of an incident's evidence.

    It is the one that the report names, if it can be, then one of the call that was
    bad; then the one with most finite values, which show where its magnitudes were.

    Returns:
        The histogram; None if no tensor is kept or can be read, safetensors is not
        installed, or no tensor is bad.
    """
    path = incident.tensors
    try:
        label = str(incident.first.get("label") or "")
        found = None if path is None else _worst(path, label)
    except (ImportError, OSError, FileError):
        return None
    if found is None:
        return None
    counted = _counted(*found)
    return replace(counted, is_first=counted.name == label)


def _worst(path: Path, label: str) -> tuple[str, torch.Tensor] | None:
    worst, most = None, (False, False, -1)
    with open_tensors(path) as file:
        for name in file.keys():  # noqa: SIM118  (it is no dict)
            tensor = file.get_tensor(name)
            if not tensor.dtype.is_floating_point:
                continue
            num_finite = int(tensor.double().isfinite().sum())
            rank = _plain(name) == label, name.startswith(_CALL), num_finite
            if num_finite < tensor.numel() and rank > most:
                worst, most = (name, tensor), rank
    return worst


def _plain(name: str) -> str:
    """A tensor's name as reports have it: `['call'][2]` is the call's output."""
    for begin, word in _PARTS.items():
        if name.startswith(begin):
            return word + name.removeprefix(begin)
    return name[2:-2] if name.startswith("['") and name.count("[") == 1 else name


def _counted(name: str, tensor: torch.Tensor) -> Histogram:
    values, info = tensor.double(), torch.finfo(tensor.dtype)
    is_bad = ~values.isfinite()
    own = values[~is_bad & (values != 0)].abs()
    bad = is_bad.nonzero()
    rows = bad[:, 0].bincount().tolist() if values.dim() else []
    return Histogram(
        _plain(name),
        tuple(tensor.shape),
        _bins(own),
        math.frexp(info.smallest_normal)[1] - 1,
        math.frexp(info.max)[1] - 1,
        int((values == 0).sum()),
        [tuple(place) for place in bad[:_FEW].tolist()],
        [(i, count) for i, count in enumerate(rows) if count][:_FEW],
        dtype=dtype_name(tensor.dtype),
        numel=tensor.numel(),
        num_nan=int(values.isnan().sum()),
        num_inf=int(values.isinf().sum()),
    )


def _bins(magnitudes: torch.Tensor) -> list[tuple[int, int]]:
    """Counts finite magnitudes other than 0 by their exponents."""
    if not len(magnitudes):
        return []
    exponents = torch.frexp(magnitudes).exponent - 1
    lowest = int(exponents.min())
    counts = (exponents - lowest).bincount().tolist()
    return list(enumerate(counts, lowest))
