"""Properties of the scan over drawn dtypes, shapes, strides, offsets and values."""

import math

import pytest
import torch
from devices import BACKENDS, scan_on
from hypothesis import given, settings
from hypothesis import strategies as st

from overflow_fast import scan

pytestmark = pytest.mark.usefixtures("emulated_kernels")
FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
SPECIAL = {
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "max": None,
    "tiny": None,
    "zero": -0.0,
}


def special_value(name, dtype):
    info = torch.finfo(dtype)
    return {"max": info.max, "tiny": info.smallest_normal / 2}.get(name, SPECIAL[name])


@st.composite
def strided(draw, dtypes):
    """A tensor of drawn sizes, with gaps, permuted, expanded, at an odd offset."""
    dtype = draw(st.sampled_from(dtypes))
    sizes = draw(st.lists(st.integers(1, 12), max_size=4))
    steps = [draw(st.integers(1, 3)) for _ in sizes]
    offset = draw(st.integers(0, 33))
    total = offset + math.prod(n * s for n, s in zip(sizes, steps, strict=True))
    seed = draw(st.integers(0, 2**31))
    bits = torch.randint(
        0,
        64 if dtype.is_floating_point else 256,
        (total * dtype.itemsize,),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )
    flat = bits.view(dtype)[offset:]
    full = flat.reshape([n * s for n, s in zip(sizes, steps, strict=True)])
    tensor = full[tuple(slice(None, None, s) for s in steps)]
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    return tensor


def magnitudes(tensor):
    return tensor.to(torch.float64).abs().flatten().tolist()


def elements(tensor):
    """The bytes of a tensor's elements, copied."""
    return (
        tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    )


def check(tensor, backend):
    before = elements(tensor)
    stat = scan_on([tensor], backend)[0]
    values = magnitudes(tensor)
    has_nan = any(math.isnan(v) for v in values)
    assert (stat.has_nan, stat.has_inf) == (has_nan, math.inf in values)
    if has_nan:
        assert math.isnan(stat.abs_min) and math.isnan(stat.abs_max)
    else:
        assert (stat.abs_min, stat.abs_max) == (min(values), max(values))
    assert torch.equal(before, elements(tensor))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_planted_values(backend, data):
    tensor = data.draw(strided(FLOATS))
    flat_index = data.draw(st.integers(0, tensor.numel() - 1))
    name = data.draw(st.sampled_from([None, *SPECIAL]))
    if name is not None:
        index = []
        for size in reversed(tensor.shape):
            index.append(flat_index % size)
            flat_index //= size
        tensor[tuple(reversed(index))] = special_value(name, tensor.dtype)
    check(tensor, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=50, deadline=None)
@given(tensor=strided(INTEGERS))
def test_integers(backend, tensor):
    stat = scan_on([tensor], backend)[0]
    values = [abs(v) for v in tensor.flatten().tolist()]
    assert (stat.abs_min, stat.abs_max) == (min(values), max(values))
    assert stat.is_finite


@settings(max_examples=50, deadline=None)
@given(tensors=st.lists(strided([*FLOATS, *INTEGERS]), max_size=6))
def test_a_list_is_scanned_as_each_of_its_tensors(tensors):
    assert scan(tensors) == [scan([tensor])[0] for tensor in tensors]


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_the_stat_does_not_depend_on_the_layout(data):
    tensor = data.draw(strided(FLOATS))
    copy = tensor.contiguous()
    assert scan([tensor]) == scan([copy]) == scan([copy.flatten().unsqueeze(-1)])
