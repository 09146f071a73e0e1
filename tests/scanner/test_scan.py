"""The scan against an oracle written from the definition in float64 torch."""

import math

import pytest
import torch
from devices import BACKENDS, scan_on
from scan_cases import COMPLEX, FLOATS, INTEGERS, layouts, random_bits

import overflow_fast
from overflow_fast import scan

pytestmark = pytest.mark.usefixtures("emulated_kernels")


def same(a, b):
    return a == b or (a != a and b != b)


def oracle(tensor):
    """abs_min, abs_max, has_nan, has_inf of a non-empty tensor, from the definition."""
    if tensor.dtype in INTEGERS:
        values = [abs(int(x)) for x in tensor.flatten().tolist()]
        return min(values), max(values), False, False
    if tensor.dtype.is_complex:
        wide = torch.view_as_real(tensor.resolve_conj()).to(torch.float64)
        magnitude = torch.hypot(wide[..., 0], wide[..., 1])
        part = torch.view_as_real(tensor).dtype
        magnitude = magnitude.to(part).to(torch.float64)
        has_nan, has_inf = wide.isnan().any(), wide.isinf().any()
    else:
        magnitude = tensor.to(torch.float64).abs()
        has_nan, has_inf = magnitude.isnan().any(), magnitude.isinf().any()
    low, high = magnitude.min().item(), magnitude.max().item()
    return low, high, bool(has_nan), bool(has_inf)


def check(tensor, backend="auto"):
    stat = scan_on([tensor], backend)[0]
    low, high, has_nan, has_inf = oracle(tensor)
    assert stat.not_scanned is None
    assert (stat.has_nan, stat.has_inf) == (has_nan, has_inf)
    if (
        backend == "cuda" and tensor.dtype is torch.complex128
    ):  # its hypot is not the CPU's
        low, high = (pytest.approx(x, rel=1e-15, nan_ok=True) for x in (low, high))
    assert same(stat.abs_min, low), (stat, low)
    assert same(stat.abs_max, high), (stat, high)
    assert (stat.numel, stat.dtype) == (tensor.numel(), tensor.dtype)


def planted(dtype):
    info = torch.finfo(dtype)
    values = {"none": None, "max": info.max, "minus max": info.min}
    values |= {"tiny": info.tiny, "subnormal": info.smallest_normal / 2, "-0": -0.0}
    values |= {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    return values


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_bit_pattern_of_8_and_16_bits(backend):
    for dtype in [*FLOATS, *INTEGERS]:
        if dtype.itemsize > 2 or dtype is torch.bool:
            continue
        bits = torch.arange(2 ** (8 * dtype.itemsize))
        bits = bits.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16)
        check(bits.view(dtype), backend)
        patterns = bits.view(dtype)[:: 1 if dtype.itemsize == 1 else 97]
        for pattern, stat in zip(
            patterns, scan_on(list(patterns), backend), strict=True
        ):
            low, high, has_nan, has_inf = oracle(pattern)
            assert same(stat.abs_min, low) and same(stat.abs_max, high), pattern
            assert (stat.has_nan, stat.has_inf) == (has_nan, has_inf), pattern


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, *INTEGERS], ids=str)
def test_random_bits(dtype, backend):
    for numel in [1, 3, 15, 16, 17, 63, 64, 65, 127, 257, 40000]:
        check(random_bits(dtype, numel), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FLOATS[:4], ids=str)
@pytest.mark.parametrize("numel", [1, 31, 300, 70001])
def test_planted_values(dtype, numel, backend):
    for value in planted(dtype).values():
        for position in {0, numel // 2, max(0, numel - 2), numel - 1}:
            tensor = random_bits(dtype, numel)
            if value is not None:
                tensor[position] = value
            check(tensor, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_planted_complex(dtype, backend):
    inf, nan = math.inf, math.nan
    for value in [(inf, 1), (1, -inf), (nan, 1), (inf, nan), (nan, -inf), (6e4, 6e4)]:
        parts = torch.ones(37, 2).to(
            torch.view_as_real(torch.zeros(1, dtype=dtype)).dtype
        )
        parts[5] = torch.tensor(value)
        check(torch.view_as_complex(parts), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, *INTEGERS], ids=str)
def test_layouts(dtype, backend):
    for name, tensor in layouts(dtype):
        try:
            check(tensor, backend)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FLOATS[:4], ids=str)
def test_layouts_see_only_their_own_elements(dtype, backend):
    base = torch.full((8, 40), math.nan).to(dtype)
    base[1:7, 2:35] = 1.0
    assert scan_on([base[1:7, 2:35]], backend)[0].is_finite
    assert scan_on([base[1:7, 2:35].t()], backend)[0].is_finite
    assert scan_on([base[1:7, 2:35:2]], backend)[0].is_finite
    assert scan_on([base], backend)[0].has_nan


@pytest.mark.parametrize("backend", ["auto", "emulated"])
def test_memory_that_is_not_aligned_to_its_elements(backend):
    raw = bytearray(4 * 1000 + 1)
    tensor = torch.frombuffer(raw, dtype=torch.float32, offset=1, count=1000)
    tensor.fill_(3.0)
    tensor[999] = -5.0
    check(tensor, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty(backend):
    for shape in [(0,), (3, 0, 2)]:
        stat = scan_on([torch.zeros(shape)], backend)[0]
        assert stat.is_empty and stat.is_finite
        assert (stat.abs_min, stat.abs_max, stat.numel) == (None, None, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_magnitude_of_int_min(backend):
    for dtype in (each for each in INTEGERS if each.is_signed):
        low = torch.iinfo(dtype).min
        stat = scan_on([torch.tensor([low, 1], dtype=dtype)], backend)[0]
        assert (stat.abs_min, stat.abs_max) == (1, -low)
    stat = scan_on([torch.tensor([2**64 - 1], dtype=torch.uint64)], backend)[0]
    assert stat.abs_max == 2**64 - 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_list_of_any_tensors(backend):
    tensors = [t for dtype in FLOATS for _, t in layouts(dtype)]
    tensors += [torch.zeros(0), *(random_bits(d, 100) for d in [*INTEGERS, *COMPLEX])]
    tensors = [tensors[i % len(tensors)] for i in range(1100)]
    singly = {id(t): scan([t])[0] for t in tensors}
    for tensor, stat in zip(tensors, scan_on(tensors, backend), strict=True):
        if not (backend == "cuda" and tensor.dtype is torch.complex128):
            assert repr(stat) == repr(singly[id(tensor)])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", FLOATS[:5], ids=str)
def test_planted_in_a_large_tensor_on_the_gpu(dtype):
    tensor = torch.ones(3_000_001, device="cuda").to(dtype)
    for position in [0, 1, 7, 1_500_000, 2_999_999, 3_000_000]:
        kept = tensor.view(torch.uint8)[position * dtype.itemsize :][: dtype.itemsize]
        before = kept.clone()
        kept.fill_(0xFF)  # a nan in all of them
        assert scan([tensor])[0].has_nan, position
        kept.copy_(before)
    assert scan([tensor])[0].is_finite


@pytest.mark.cuda
def test_more_than_2_to_the_33_elements_on_the_gpu():
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs 10 GiB of GPU memory")
    tensor = torch.ones(2**33 + 7, dtype=torch.float8_e5m2, device="cuda")
    tensor.view(torch.uint8)[-1] = 0x7C
    stat = scan([tensor])[0]
    assert stat.has_inf and not stat.has_nan and stat.numel == 2**33 + 7
    assert scan([tensor[1:-1]])[0].is_finite
    assert scan([tensor[: 2**33].view(2, -1)[:, ::2]])[0].is_finite


@pytest.fixture
def several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_large_tensors_use_every_thread_and_lose_nothing(several_threads):
    tensor = torch.ones(3_000_001, dtype=torch.bfloat16)
    for position in [0, 1_500_000, 1_500_001, 3_000_000]:
        tensor[position] = math.nan
        assert scan([tensor])[0].has_nan, position
        tensor[position] = 1.0
    assert scan([tensor])[0].is_finite
    check(tensor[:3_000_000].view(1_000_000, 3).t()[:2])


@pytest.mark.slow
def test_more_than_2_to_the_31_elements():
    tensor = torch.ones(2**31 + 7, dtype=torch.float8_e5m2)
    tensor.view(torch.uint8)[-1] = 0x7C
    stat = scan([tensor])[0]
    assert stat.has_inf and not stat.has_nan and stat.numel == 2**31 + 7


def test_wrappers_are_scanned_where_their_values_lie():
    sparse = torch.tensor([[0.0, math.inf], [2.0, 0.0]]).to_sparse()
    assert scan([sparse])[0].has_inf
    assert scan([torch.tensor([[0.0, 3.0]]).to_sparse_csr()])[0].abs_max == 3.0
    jagged = torch.nested.nested_tensor(
        [torch.ones(2), torch.full((3,), 4.0)], layout=torch.jagged
    )
    assert scan([jagged])[0].abs_max == 4.0
    assert scan([torch.nn.Parameter(torch.tensor([7.0]))])[0].abs_max == 7.0
    assert scan([torch.tensor([1 + 1j]).conj()])[0].abs_max == pytest.approx(2**0.5)

    class Plain(torch.Tensor):
        pass

    assert scan([torch.tensor([7.0]).as_subclass(Plain)])[0].abs_max == 7.0


def test_what_cannot_be_scanned_says_why():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    freed = torch.ones(5)
    freed.untyped_storage().resize_(0)
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    cases = {
        "meta tensor": torch.ones(3, device="meta"),
        "fake tensor": fake,
        "quantized": quantized,
        "its storage is freed": freed,
        "dtype torch.float4_e2m1fn_x2": packed,
        "layout torch._mkldnn": torch.ones(3).to_mkldnn(),
    }
    for why, tensor in cases.items():
        stat = scan([tensor])[0]
        assert stat.not_scanned == why
        assert not stat.is_finite and not stat.is_empty


def test_inside_vmap(as_kept):
    seen = []

    def function(x):
        seen.append(scan([x])[0].not_scanned)
        return x

    torch.vmap(function)(torch.ones(3))
    as_kept(seen)


def test_wrong_arguments(as_kept):
    as_kept.error(TypeError, scan, torch.ones(1))
    as_kept.error(TypeError, scan, [1])
    as_kept.error(ValueError, scan, [], backend="cuda")


def test_scan_has_no_gradient_and_keeps_no_graph():
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    assert scan([y])[0].abs_max == 2.0
    y.sum().backward()
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_isa_is_known():
    assert overflow_fast._C.isa() in ("baseline", "avx2", "avx512")
