"""The columns of a line, as numbers: of a record that is read, or thinned."""

from __future__ import annotations

import sys
from array import array
from typing import TYPE_CHECKING

from msgspec import UNSET

from .record_lines import COUNTS, Columns

if TYPE_CHECKING:
    import torch

    Numbers = array[float] | array[int]


def read_numbers(columns: Columns, name: str, byteorder: str) -> Numbers | None:
    """A column of a line: floats, or whole numbers for counts.

    Returns:
        An array of `columns.num` numbers; None where nothing counted them. In extremes
        nan stands for an entry that was not looked at, or held a nan; in counts -1 for
        one that was not counted.
    """
    packed = getattr(columns, name)
    if packed is UNSET:
        return None
    return unpacked(packed, columns.num, name in COUNTS, byteorder)


def unpacked(
    packed: bytes, num: int, are_counts: bool, byteorder: str = sys.byteorder
) -> Numbers:
    """The numbers of a column, of a line or of a row of the recorder."""
    code = "q" if are_counts else "d"
    if not packed:  # all are 0
        return array(code, bytes(8 * num))
    numbers: Numbers = array(code if len(packed) // num == 8 else "f", packed)
    if byteorder != sys.byteorder:
        numbers.byteswap()
    return numbers


def as_tensor(numbers: Numbers) -> torch.Tensor:
    """The same numbers as a tensor on the CPU: float64, or int64 for counts."""
    import torch

    dtypes = {"f": torch.float32, "d": torch.float64, "q": torch.int64}
    stored = dtypes[numbers.typecode]
    if not numbers:
        return torch.empty(0, dtype=stored, device="cpu")
    found = torch.frombuffer(numbers, dtype=stored)
    return found.double() if found.is_floating_point() else found
