"""The fingerprint of a tensor: 251 signed sums, in an order that is part of the format.

See summary.py for what they estimate. Element i is added to the sum i % 251. 251 is
prime, so no usual hidden size is a multiple of it: channels with large values are
spread over all sums. Row r of 251 elements has the signs of pattern r % 64, and a sign
of its own.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator

import torch

from ... import _C

WIDTH = 251  # sums, a prime: as float32 they take 1004 bytes
_PATTERNS = 64  # rows of signs before they repeat; chosen, not measured
_PERIOD = WIDTH * _PATTERNS
_PERIODS = 16  # a pass: 1 MiB of float32, which stays in a core's cache
_CHUNK = _PERIOD * _PERIODS


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Switches off what of the user's could change, or see, how numbers are computed.

    No function or dispatch mode, no inference mode, no gradients, and no flush of
    subnormal numbers to 0: of that there is no getter but the arithmetic itself.
    """
    flushes = sys.float_info.min / 2 == 0
    with _C.Hidden(), torch.inference_mode(False), torch.no_grad():
        if flushes:
            torch.set_flush_denormal(False)
        try:
            yield
        finally:
            if flushes:
                torch.set_flush_denormal(True)


def wide_dtype(values: torch.Tensor) -> torch.dtype:
    """The dtype in which values are summed."""
    is_long = values.dtype == torch.float64 or not values.dtype.is_floating_point
    has_float64 = values.device.type != "mps"
    return torch.float64 if is_long and has_float64 else torch.float32


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
        sums = self._sums * _pattern_signs(self._sums.device).to(self._sums.dtype)
        return _halved(sums, _PATTERNS // 2)


def _sums_by_pattern(part: torch.Tensor, lead: int, period: int) -> torch.Tensor:
    """Sums rows of the same pattern, each with its sign.

    Element by element, in an order that docs/formats.md specifies: a product of
    matrices would round as autocast, TF32 and the device's library please.

    Args:
        part: At most a chunk of values.
        lead: How many elements of its first period are before it.
        period: The number of that period.
    """
    behind = -(lead + len(part)) % _PERIOD
    if lead or behind:
        part = torch.nn.functional.pad(part, (lead, behind))
    rows = part.view(-1, _PATTERNS, WIDTH)
    signs = _row_signs(period, part.device)[: len(rows)].to(part.dtype)
    half = _PERIODS // 2
    sums = rows[:half] * signs[:half]
    if len(rows) > half:  # in one pass with the product, which is exact
        sums[: len(rows) - half].addcmul_(rows[half:], signs[half:])
    return _halved(sums, half // 2)


def _halved(sums: torch.Tensor, half: int) -> torch.Tensor:
    """Adds rows up: each to the one that is half of them before it, and again."""
    while half:
        if len(sums) > half:
            sums[: len(sums) - half] += sums[half:]
            sums = sums[:half]
        half //= 2
    return sums[0]


@functools.lru_cache(maxsize=256)
def _row_signs(period: int, device: torch.device) -> torch.Tensor:
    """The signs of the rows of a chunk, of shape `[periods, patterns, 1]`."""
    first = period * _PATTERNS
    rows = torch.arange(first, first + _PERIODS * _PATTERNS, device="cpu")
    return _signs(rows, 1).view(_PERIODS, _PATTERNS, 1).to(device)


@functools.lru_cache(maxsize=16)
def _pattern_signs(device: torch.device) -> torch.Tensor:
    numbers = torch.arange(_PERIOD, device="cpu")
    return _signs(numbers, 2).view(_PATTERNS, WIDTH).to(device)


def _signs(numbers: torch.Tensor, seed: int) -> torch.Tensor:
    """Random signs of integers: the lowest bit of MurmurHash3's 32-bit finalizer."""
    mask = 0xFFFFFFFF
    bits = (numbers + seed * 0x9E3779B9) & mask
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & mask
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & mask
    return ((bits ^ (bits >> 16)) & 1).float() * 2 - 1
