"""The summary that stands for a tensor, its fingerprint, and how far two are apart.

A fingerprint is 251 signed sums of a tensor. Element i is added to the sum i % 251 with
a sign that depends on i alone, so that

- the squared length of the difference of two fingerprints estimates that of the
  difference of the tensors, with a standard error of about 9 % (a count sketch:
  Charikar, Chen and Farach-Colton, Finding frequent items in data streams, 2002);
- they are linear: those of shards, each at its place in the whole tensor, and of
  partial sums, add up to that of the whole.

Sums are rounded in an order that is part of the format (docs/formats.md), so one tensor
has one fingerprint on every device, with any number of threads and in any mode.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Annotated

import torch
from msgspec import Struct

from ...base.tensors import PLAIN, NotScanned, real_parts, resolve
from ...guard.files.fields import Count, Number, meaning
from .shards import Shard, pieces
from .signed_sums import WIDTH, SignedSums, wide_dtype, without_modes


class Summary(Struct):
    """Ranges, counts and the fingerprint of a tensor; of finite values only."""

    low: Annotated[Number, meaning("the least value, or nan if there is none")] = "nan"
    high: Annotated[Number, meaning("the greatest value")] = "nan"
    squares: Annotated[Number, meaning("the sum of squares")] = 0.0
    num_nan: Annotated[Count, meaning("how many elements are nan")] = 0
    num_inf: Annotated[Count, meaning("how many are inf or -inf")] = 0
    fingerprint: Annotated[bytes | None, meaning("251 sums, in base64")] = None

    @property
    def norm(self) -> float:
        """The L2 norm of the finite values; 0 if it is not known."""
        return math.sqrt(float(self.squares))

    @property
    def sums(self) -> torch.Tensor:
        """The fingerprint as 251 float64 on the CPU; 0 if it is not known."""
        data = self.fingerprint or bytes(4 * WIDTH)
        form = "f" if len(data) == 4 * WIDTH else "d"
        numbers = struct.unpack(f"<{WIDTH}{form}", data)
        with without_modes():
            return torch.tensor(numbers, dtype=torch.float64, device="cpu")

    def take(self, found: Summary) -> None:
        """Takes over the numbers of another."""
        for name in Summary.__struct_fields__:
            setattr(self, name, getattr(found, name))

    def check(self) -> None:
        """Raises ValueError if the fingerprint is none; makes texts to numbers."""
        if self.fingerprint is not None:
            if len(self.fingerprint) not in (4 * WIDTH, 8 * WIDTH):
                raise ValueError(f"a fingerprint has {len(self.fingerprint)} bytes")
            numbers = map(float, (self.low, self.high, self.squares))
            self.low, self.high, self.squares = numbers


def summary_of(numbers: torch.Tensor) -> Summary:
    """The summary of numbers of `summarize()` that are on the CPU."""
    low, high, squares, num_nan, num_inf, *sums = numbers.tolist()
    form = "f" if numbers.dtype == torch.float32 else "d"
    fingerprint = struct.pack(f"<{WIDTH}{form}", *sums)
    return Summary(low, high, squares, int(num_nan), int(num_inf), fingerprint)


def added(parts: Sequence[Summary], is_partial: bool) -> Summary:
    """The summary of a tensor from those of its parts.

    Args:
        parts: The parts, each at its place in the whole.
        is_partial: Whether they are added, so that their range is not known.
    """
    total = torch.stack([each.sums for each in parts]).sum(0)
    ranges = [(float(each.low), float(each.high)) for each in parts]
    low = min((low for low, _ in ranges if not math.isnan(low)), default=math.nan)
    high = max((high for _, high in ranges if not math.isnan(high)), default=math.nan)
    squares = sum(float(each.squares) for each in parts)
    if is_partial:
        low = high = math.nan
        squares = float(total.square().sum())
    counts = sum(each.num_nan for each in parts), sum(each.num_inf for each in parts)
    numbers = torch.tensor([low, high, squares, *counts], dtype=torch.float64)
    return summary_of(torch.cat([numbers, total]))


def fetch(numbers: list[torch.Tensor]) -> list[Summary]:
    """Copies what `summarize()` returned to the CPU, in one copy a device and dtype.

    Incurs a CPU-GPU sync for each.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, each in enumerate(numbers):
        groups.setdefault((each.device, each.dtype), []).append(i)
    found: dict[int, Summary] = {}
    for indices in groups.values():
        with without_modes():
            table = torch.stack([numbers[i] for i in indices]).cpu()
            found |= zip(indices, map(summary_of, table), strict=True)
    return [found[i] for i in range(len(numbers))]


def values_of(tensor: torch.Tensor) -> torch.Tensor | NotScanned:
    """The real numbers of a tensor, or why they cannot be read."""
    values = tensor.detach() if type(tensor) in PLAIN else resolve(tensor)
    if isinstance(values, NotScanned):
        return values
    if type(values) not in PLAIN or values.layout is not torch.strided:
        return resolve(values)
    if values.is_meta:
        return NotScanned("meta tensor")
    if values.is_quantized:
        return NotScanned("quantized")
    return real_parts(values)


def summarize(values: torch.Tensor, part: Shard | None = None) -> torch.Tensor:
    """Computes the numbers of a summary. Does not incur a CPU-GPU sync.

    Args:
        values: What `values_of()` returned.
        part: Its place in a tensor that ranks share.

    Returns:
        The numbers on the tensor's device, for `fetch()`.
    """
    with without_modes():
        wide = wide_dtype(values)
        numbers = _numbers(values, part, wide, False)
        # Without what is not finite; then, where squares leave float32, in float64.
        for dtype in (wide, torch.float64):
            if values.device.type == "cpu" and not numbers[2].isfinite():
                numbers = _numbers(values, part, dtype, True)
        return numbers


def _numbers(
    values: torch.Tensor, part: Shard | None, wide: torch.dtype, is_slow: bool
) -> torch.Tensor:
    """Low, high, squares, counts of nan and inf, and the fingerprint, in one tensor."""
    device = values.device
    is_slow = is_slow or device.type != "cpu"
    sums, found = SignedSums(device, wide), list[torch.Tensor]()
    for chunk, index in pieces(values, part):
        chunk = chunk.to(wide)
        if is_slow:
            stat, chunk = _cleaned(chunk)
        else:
            zero = chunk.new_zeros(())
            stat = torch.stack([*chunk.aminmax(), _squared(chunk), zero, zero])
        found.append(stat)
        sums.add(chunk, index)
    if not found:
        empty = torch.zeros(5 + WIDTH, dtype=wide, device=device)
        empty[:2] = math.nan
        return empty
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
    return torch.stack([low, high, _squared(chunk), *counts]), chunk


def _squared(values: torch.Tensor) -> torch.Tensor:
    """The sum of squares; `dot()` rounds its factors where products may be coarse."""
    return values.square().sum()


def _range(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the greatest finite value."""
    is_finite = values.isfinite()
    low = values.where(is_finite, math.inf).min()
    return low, values.where(is_finite, -math.inf).max()


def distance(summary: Summary, reference: Summary) -> float:
    """The relative L2 difference of two tensors, good to about 10 %."""
    if summary.fingerprint == reference.fingerprint:
        return 0.0
    apart = float((summary.sums - reference.sums).square().sum())
    if not reference.norm:
        return math.inf if apart else 0.0
    return math.sqrt(apart) / reference.norm


def factor_of(summary: Summary, reference: Summary) -> tuple[float, float]:
    """Finds the number by which a tensor is a multiple of another, if it is.

    Returns:
        The number, and the relative difference that it leaves: about 1e-7 where the
        tensor is a multiple in float32, inf where it cannot be one.
    """
    mine, its = summary.sums, reference.sums
    if not mine.any() or not its.any():
        is_multiple = not mine.any()
        return float(not its.any()), 0.0 if is_multiple else math.inf
    square = float(its.square().sum())
    factor = float((mine * its).sum()) / square
    rest = float((mine - factor * its).square().sum())
    return factor, math.sqrt(rest / square) / abs(factor) if factor else math.inf
