"""The numbers that a recording keeps of a tensor."""

from __future__ import annotations

import base64
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..core.tensors import NotScanned, resolve
from .fingerprint import WIDTH, Sums, wide_dtype
from .shards import Part, pieces

if TYPE_CHECKING:
    from .recording_schema import RowLine

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass
class Summary:
    """Ranges, counts and the fingerprint of a tensor; of finite values only.

    Attributes:
        low: The least value, or nan if there is none.
        high: The greatest value.
        squares: The sum of their squares.
        num_nan: How many are nan.
        num_inf: How many are inf or -inf.
        sums: The fingerprint, 251 float64 on the CPU.
    """

    low: float
    high: float
    squares: float
    num_nan: int
    num_inf: int
    sums: torch.Tensor

    @property
    def norm(self) -> float:
        """The L2 norm of the finite values."""
        return math.sqrt(self.squares)

    def to_plain(self) -> dict[str, Any]:
        """The summary as JSON; the fingerprint as 251 float32 (float64) in base64."""
        sums = self.sums.tolist()
        try:
            data = struct.pack(f"<{WIDTH}f", *sums)
        except OverflowError:  # masks have the lowest number of their dtype many times
            data = struct.pack(f"<{WIDTH}d", *sums)
        return {
            "low": self.low,
            "high": self.high,
            "squares": self.squares,
            "num_nan": self.num_nan,
            "num_inf": self.num_inf,
            "fingerprint": base64.b64encode(data).decode(),
        }

    @classmethod
    def of_line(cls, line: RowLine) -> Summary:
        """Makes one of a line that has a fingerprint."""
        data = line.fingerprint
        assert data is not None
        form = "f" if len(data) == 4 * WIDTH else "d"
        numbers = struct.unpack(f"<{WIDTH}{form}", data)
        sums = torch.tensor(numbers, dtype=torch.float64)
        low, high, squares = map(float, (line.low, line.high, line.squares))
        return cls(low, high, squares, line.num_nan, line.num_inf, sums)


def fetch(numbers: list[torch.Tensor]) -> list[Summary]:
    """Copies what `summarize()` returned to the CPU, in one copy a device and dtype.

    Incurs a CPU-GPU sync for each.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, each in enumerate(numbers):
        groups.setdefault((each.device, each.dtype), []).append(i)
    found: dict[int, Summary] = {}
    for indices in groups.values():
        table = torch.stack([numbers[i] for i in indices]).cpu().double()
        for i, row in zip(indices, table, strict=True):
            low, high, squares, num_nan, num_inf = row[:5].tolist()
            sums = row[5:].clone()
            found[i] = Summary(low, high, squares, int(num_nan), int(num_inf), sums)
    return [found[i] for i in range(len(numbers))]


def values_of(tensor: torch.Tensor) -> torch.Tensor | NotScanned:
    """The real numbers of a tensor, or why they cannot be read."""
    values = tensor.detach() if type(tensor) in _PLAIN else resolve(tensor)
    if isinstance(values, NotScanned):
        return values
    if type(values) not in _PLAIN or values.layout is not torch.strided:
        return resolve(values)
    if values.is_meta:
        return NotScanned("meta tensor")
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def summarize(
    values: torch.Tensor, part: Part | None = None, has_sums: bool = True
) -> torch.Tensor:
    """Computes the numbers of a summary. Does not incur a CPU-GPU sync.

    Args:
        values: What `values_of()` returned.
        part: Its place in a tensor that ranks share.
        has_sums: Whether to compute the fingerprint; else it is 0.

    Returns:
        The numbers on the tensor's device, for `fetch()`.
    """
    with torch.no_grad():
        numbers = _numbers(values, part, wide_dtype(values), False, has_sums)
        if values.device.type == "cpu" and not numbers[2].isfinite():
            numbers = _numbers(values, part, torch.float64, True, has_sums)
        return numbers


def _numbers(
    values: torch.Tensor,
    part: Part | None,
    wide: torch.dtype,
    is_slow: bool,
    has_sums: bool,
) -> torch.Tensor:
    """Low, high, squares, counts of nan and inf, and the fingerprint, in one tensor."""
    device = values.device
    is_slow = is_slow or device.type != "cpu"
    sums, found = Sums(device, wide), list[torch.Tensor]()
    for chunk, index in pieces(values, part):
        chunk = chunk.to(wide)
        if is_slow:
            stat, chunk = _cleaned(chunk)
        else:
            zero = chunk.new_zeros(())
            stat = torch.stack([*chunk.aminmax(), chunk.dot(chunk), zero, zero])
        found.append(stat)
        if has_sums:
            sums.add(chunk, index)
    if not found:
        nan, zero = torch.full((2,), math.nan, dtype=wide), torch.zeros(3, dtype=wide)
        return torch.cat([nan, zero, torch.zeros(WIDTH, dtype=wide)]).to(device)
    all_of = torch.stack(found)
    low, high = all_of[:, 0].min(), all_of[:, 1].max()
    if part is not None:  # laid out among zeros, which are not its own
        low, high = _range(values.to(wide))
    return torch.cat([torch.stack([low, high, *all_of[:, 2:].sum(0)]), sums.total()])


def _cleaned(chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of a chunk, and the chunk with 0 for what is not finite."""
    is_nan, is_finite = chunk.isnan(), chunk.isfinite()
    low, high = _range(chunk)
    chunk = chunk.where(is_finite, 0)
    num_nan = is_nan.sum()
    num_inf = chunk.numel() - is_finite.sum() - num_nan
    counts = [num_nan.to(chunk.dtype), num_inf.to(chunk.dtype)]
    return torch.stack([low, high, chunk.dot(chunk), *counts]), chunk


def _range(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the greatest finite value."""
    is_finite = values.isfinite()
    low = values.where(is_finite, math.inf).min()
    return low, values.where(is_finite, -math.inf).max()
