"""Numbers of a sample unlike the others: placeholders such as -9999, and outliers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..base.text import dtype_name, rounded
from .bounds import ODD_NUMBER, OUTLIER, PLACEHOLDER
from .calls import Call
from .tensor_kinds import as_wide, index_at, is_float

# Numbers that programs write for a missing value, besides those of 9s: netCDF's fill
# value of floats, other large ones, and the ends of int16.
_KNOWN = (9.969209968386869e36, 1e20, 1e30, -32768.0, 32767.0)
_NINES = tuple(float(f"{sign}{'9' * num}") for sign in "-+" for num in (3, 4, 5, 6))


@dataclass(frozen=True)
class Sentinel:
    """A number of one sample that looks like a placeholder.

    Attributes:
        name: The tensor of the batch that holds it.
        number: The number.
        text: It with its place, in words.
        can_be_replaced: Whether the program can put 0 there: no other tensor of the
            batch holds it, and it is not that of a mask, whose other numbers are 0.
    """

    name: str
    number: float
    text: str
    can_be_replaced: bool


def sentinel_in(call: Call, sample: int) -> Sentinel | None:
    """Finds a number of one sample that looks like a placeholder.

    Args:
        call: The call that failed because of the sample.
        sample: The sample.
    """
    for name, tensor, values in _with_samples(call, sample):
        own = values[sample]
        if own.is_complex() or not own.numel() or not bool(own.isfinite().all()):
            continue
        place = int(own.abs().flatten().argmax())
        number = float(own.flatten()[place])
        others = values.abs()[values != number]
        others = others[others.isfinite()]
        most = float(others.max()) if others.numel() else 0.0
        what = _what(number, most, tensor.dtype)
        if what is not None:
            at = [sample, *index_at(place, own.shape)]
            size = f"at most {most:.3g} in magnitude" if most else "0"
            rest = f"its other numbers are {size}"
            text = f"`{name}` holds {number:.6g} at {at}{what}; {rest}"
            floats = [each for _, each in call.leaves() if is_float(each)]
            num = sum(bool((each == number).any()) for each in floats)
            return Sentinel(name, number, text, num == 1 and most > 0)
    return None


def _with_samples(
    call: Call, sample: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yields name, tensor and values of what holds one sample and others."""
    for name, tensor in call.leaves():
        values = as_wide(tensor) if is_float(tensor) else None
        if values is not None and values.dim() and len(values) > max(1, sample):
            yield name, tensor, values


@dataclass(frozen=True)
class Outlier:
    """A tensor of the batch in which one sample is far larger than all others.

    Attributes:
        name: The tensor.
        largest: The largest magnitude of the sample.
        most: That of the others.
    """

    name: str
    largest: float
    most: float

    @property
    def text(self) -> str:
        """The tensor of the batch, the value and the ratio, in words."""
        return (
            f"`{self.name}` is up to {self.largest:.3g} in magnitude there, "
            f"{rounded(self.largest / self.most, 2)} times the largest of the other "
            "samples"
        )

    @property
    def bound(self) -> float:
        """A number of one digit that tells the sample from the others."""
        return float(f"{math.sqrt(self.largest * self.most):.0e}")

    @property
    def usual(self) -> float:
        """A number of one digit that the others are below."""
        return float(f"{1.5 * self.most:.0e}")


def outliers_in(call: Call, sample: int) -> Iterator[Outlier]:
    """Yields the tensors in which a sample is far larger than all others.

    Args:
        call: The call that failed because of the sample.
        sample: The sample.
    """
    for name, _, values in _with_samples(call, sample):
        largest = values.abs().flatten(1).amax(1) if values.dim() > 1 else values.abs()
        own, others = float(largest[sample]), largest.clone()
        others[sample] = 0
        most = float(others.max())
        if math.isfinite(own) and OUTLIER.is_passed(own, most):
            yield Outlier(name, own, most)


def _what(number: float, most: float, dtype: torch.dtype) -> str | None:
    """Describes a number, with ", " in front; None for one that is like the others."""
    size, is_apart = abs(number), PLACEHOLDER.is_passed(abs(number), most)
    if size == torch.finfo(dtype).max and is_apart:
        return f", {dtype_name(dtype)}'s {'largest' if number > 0 else 'lowest'} number"
    known = {float(torch.tensor(each, dtype=dtype)) for each in (*_KNOWN, *_NINES)}
    if number in known and is_apart:
        return ", as programs write for a missing value"
    return "" if ODD_NUMBER.is_passed(size, most) else None
