"""Fingerprints: 251 signed sums of a tensor, which tell how far two tensors differ.

Element i is added to the sum i % 251 with a sign that depends on i alone, so that

- the squared length of the difference of two fingerprints estimates that of the
  difference of the tensors, with a standard error of about 9 % (a count sketch:
  Charikar, Chen and Farach-Colton, Finding frequent items in data streams, 2002);
- they are linear: those of shards, each at its place in the whole tensor, and of
  partial sums, add up to that of the whole.

251 is prime, so no usual hidden size is a multiple of it: channels with large values
are spread over all sums. Row r of 251 elements has the signs of pattern r % 64, and a
sign of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

WIDTH = 251
_PATTERNS = 64
_PERIOD = WIDTH * _PATTERNS
_PERIODS = 16  # a pass: 1 MiB of float32, which stays in a core's cache
_CHUNK = _PERIOD * _PERIODS


def fingerprint(values: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Computes the fingerprint of finite real values. Does not incur a CPU-GPU sync.

    Args:
        values: A contiguous tensor of any dtype that converts to float32.
        start: The flat index in the whole tensor of its first element.

    Returns:
        251 sums on the tensor's device, float32 (float64 of float64 and integers).
    """
    sums = SignedSums(values.device, wide_dtype(values))
    for part, index in chunks(values, start):
        sums.add(part, index)
    return sums.total()


def wide_dtype(values: torch.Tensor) -> torch.dtype:
    """The dtype in which values are summed."""
    is_long = values.dtype == torch.float64 or not values.dtype.is_floating_point
    return torch.float64 if is_long and values.device.type != "mps" else torch.float32


def chunks(values: torch.Tensor, start: int = 0) -> Iterator[tuple[torch.Tensor, int]]:
    """Yields the parts that are read at once, in a wide dtype, and where they begin."""
    flat, wide = values.detach().reshape(-1), wide_dtype(values)
    position = 0
    while position < len(flat):
        length = _CHUNK - (start + position) % _PERIOD
        part = flat[position : position + length].to(wide)
        yield part, start + position
        position += len(part)


class SignedSums:
    """The signed sums of parts of a tensor.

    Args:
        device: The parts' device.
        dtype: Theirs.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._sums = torch.zeros(_PATTERNS, WIDTH, dtype=dtype, device=device)

    def add(self, part: torch.Tensor, index: int) -> None:
        """Adds a part that begins at an index of the whole tensor."""
        period, lead = divmod(index, _PERIOD)
        self._sums += _sums_by_pattern(part, lead, period)

    def total(self) -> torch.Tensor:
        """The fingerprint."""
        sums = self._sums
        return (sums * _pattern_signs(sums.device).to(sums.dtype)).sum(0)


def _sums_by_pattern(part: torch.Tensor, lead: int, period: int) -> torch.Tensor:
    """Sums rows of the same pattern, each with its sign.

    Args:
        part: At most a chunk of values.
        lead: How many elements of its first period are before it.
        period: The number of that period.
    """
    behind = -(lead + len(part)) % _PERIOD
    if lead or behind:
        part = torch.nn.functional.pad(part, (lead, behind))
    rows = part.view(-1, _PATTERNS, WIDTH).transpose(0, 1)
    signs = _row_signs(period, part.device)[:, :, : rows.shape[1]]
    return torch.bmm(signs.to(part.dtype), rows)[:, 0]


@functools.lru_cache(maxsize=256)
def _row_signs(period: int, device: torch.device) -> torch.Tensor:
    """The signs of the rows of a chunk, of shape `[patterns, 1, periods]`."""
    first = period * _PATTERNS
    rows = torch.arange(first, first + _PERIODS * _PATTERNS).view(_PERIODS, _PATTERNS)
    return _signs(rows, 1).t().contiguous()[:, None].to(device)


@functools.lru_cache(maxsize=16)
def _pattern_signs(device: torch.device) -> torch.Tensor:
    return _signs(torch.arange(_PERIOD), 2).view(_PATTERNS, WIDTH).to(device)


def _signs(numbers: torch.Tensor, seed: int) -> torch.Tensor:
    """Random signs of integers: the lowest bit of MurmurHash3's 32-bit finalizer."""
    mask = 0xFFFFFFFF
    bits = (numbers + seed * 0x9E3779B9) & mask
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & mask
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & mask
    return ((bits ^ (bits >> 16)) & 1).float() * 2 - 1
