"""Digests of tensors: equal bits in equal places, or not."""

from __future__ import annotations

import torch

from .tensors import real_parts

_MULTIPLIER = -7046029254386353131  # 2**64 divided by the golden ratio, as int64
_CHUNK = 2**22  # elements: bounds the temporaries
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(tensor: torch.Tensor) -> torch.Tensor:
    """Computes a 64-bit digest of a tensor's bits that depends on their positions.

    The sum of (bits + 1) * (position * M | 1) modulo 2**64 with the odd multiplier M of
    Fibonacci hashing (Knuth, The Art of Computer Programming 3, 6.4). It tells any one
    changed element, and elements that changed places. Does not incur a CPU-GPU sync.

    Args:
        tensor: Any strided tensor; of complex numbers, both parts count.

    Returns:
        An int64 scalar on the tensor's device.
    """
    values = real_parts(tensor.detach())
    bits = values.contiguous().view(INTEGERS[values.element_size()]).flatten()
    digest = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin in range(0, len(bits), _CHUNK):
        part = bits[begin : begin + _CHUNK].to(torch.int64)
        places = torch.arange(begin, begin + len(part), device=bits.device)
        digest += ((part + 1) * (places * _MULTIPLIER).bitwise_or_(1)).sum()
    return digest
