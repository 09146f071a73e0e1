"""Draws the heatmap of a flight record: for TensorBoard, and PNG for notebooks."""

from __future__ import annotations

import itertools
import math
import struct
import zlib

import torch

# The colours of the page: bits of headroom, and red, green, blue in between.
_STOPS = (
    *((0, 178, 24, 43), (1, 239, 138, 98), (4, 247, 247, 247)),
    *((8, 146, 197, 222), (16, 67, 147, 195), (32, 33, 102, 172)),
)
_BLACK, _GREY = (0, 0, 0), (153, 153, 153)


def heatmap_pixels(bits: torch.Tensor, most: int) -> torch.Tensor:
    """Draws bits of headroom, entries by steps, each a pixel.

    Args:
        bits: float64 of shape `[steps, entries]`; -inf: not finite, nan: not looked at.
        most: How many columns there may be; steps share one then, which has the least.

    Returns:
        uint8 of shape `[3, entries, columns]`: red, green and blue.
    """
    size = max(1, math.ceil(len(bits) / most))
    whole = bits.masked_fill(bits.isnan(), math.inf)
    begins = range(0, len(bits), size)
    columns = [whole[i : i + size].amin(0) for i in begins]
    unseen = [bits[i : i + size].isnan().all(0) for i in begins]
    if not columns:
        return torch.zeros(3, bits.shape[1], 0, dtype=torch.uint8, device="cpu")
    least = torch.stack(columns, 1)
    pixels = torch.stack([_channel(least, i) for i in (1, 2, 3)])
    for where, colour in (
        (least == -math.inf, _BLACK),
        (torch.stack(unseen, 1), _GREY),
    ):
        paint = torch.tensor(colour, dtype=torch.uint8, device="cpu")
        pixels = torch.where(where, paint[:, None, None], pixels)
    return pixels


def _channel(bits: torch.Tensor, channel: int) -> torch.Tensor:
    """One of the three colours of each number of bits."""
    known = bits.clamp(_STOPS[0][0], _STOPS[-1][0])
    colour = torch.zeros_like(known)
    for low, high in itertools.pairwise(_STOPS):
        part = (known - low[0]) / (high[0] - low[0])
        value = low[channel] + part * (high[channel] - low[channel])
        is_here = (known >= low[0]) & (known <= high[0])
        colour = torch.where(is_here, value, colour)
    return colour.round().to(torch.uint8)


def png_of(pixels: torch.Tensor, scale: int = 1) -> bytes:
    """Writes pixels as a PNG file.

    Args:
        pixels: uint8 of shape `[3, height, width]`, both at least 1.
        scale: How many pixels high and wide each is drawn.
    """
    large = pixels.repeat_interleave(scale, 1).repeat_interleave(scale, 2)
    rows = large.permute(1, 2, 0).flatten(1)
    filtered = torch.nn.functional.pad(rows, (1, 0))  # no filter in any row
    size = struct.pack(">IIBBBBB", large.shape[2], large.shape[1], 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(filtered.flatten().tolist()))
    parts = ((b"IHDR", size), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)
