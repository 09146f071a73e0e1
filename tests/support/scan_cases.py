"""The dtypes and layouts that every scan is tried with."""

import re

import torch

# All that torch has: one that comes with a release of torch is asked for.
DTYPES = sorted(
    {each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str
)
# Several values in a byte, quantized ones, and pairs of bfloat16, for which torch has
# next to no operations. Nothing scans these.
PACKED = re.compile(r"torch\.(u?int[1-7]|bits\d.*|q.+|float4_e2m1fn_x2|bcomplex32)")
WHOLE = [dtype for dtype in DTYPES if not PACKED.fullmatch(str(dtype))]
FLOATS = [dtype for dtype in WHOLE if dtype.is_floating_point]
COMPLEX = [dtype for dtype in WHOLE if dtype.is_complex]
INTEGERS = [dtype for dtype in WHOLE if dtype not in FLOATS + COMPLEX]


def random_bits(dtype, numel, seed=0):
    """Finite elements with arbitrary bits."""
    generator = torch.Generator().manual_seed(seed)
    count = numel * dtype.itemsize
    bits = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        return bits.remainder(2).bool()
    if dtype in INTEGERS:
        return bits.view(dtype)
    if dtype.is_complex:
        return random_bits(dtype.to_real(), 2 * numel, seed).view(dtype)
    values = bits.view(dtype)
    finite = values.to(torch.float64).isfinite()
    one = torch.tensor([1.0]).to(dtype).view(torch.uint8)
    patched = bits.view(numel, -1).clone()
    patched[~finite] = one
    return patched.flatten().view(dtype)


def layouts(dtype):
    base = random_bits(dtype, 24 * 10 * 18).view(24, 10, 18)
    yield "contiguous", base
    yield "transposed", base.permute(2, 0, 1)
    yield "sliced", base[3:17, 2:9, 1:16]
    yield "every other", base[:, :, ::2]
    yield "every third row", base[::3]
    yield "column", base[:, 1, 3]
    yield "one element", base[1, 1, 1]
    yield "expanded", base[:1].expand(6, 10, 18)
    yield "expanded inside", base[:, :, 2:3].expand(24, 10, 7)
    yield "diagonal", base[0].as_strided((10,), (19,))
    yield "overlapping", base.flatten().as_strided((30, 8), (3, 1))
    yield "odd offset", base.flatten()[1:]
    yield "odd offset short", base.flatten()[3:8]
