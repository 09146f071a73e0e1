"""Scans by torch operations: the kernels' stats, little memory, lacks that are told."""

import logging

import pytest
import torch
from scan_cases import COMPLEX, FLOATS, INTEGERS, layouts
from torch.profiler import ProfilerActivity, profile

from overflow_fast import _C, DebugUnderflowOverflow, scan
from overflow_fast.scanner.ops import scan_with

BY_KERNEL = torch.ops.overflow_fast.scan.default
BY_TORCH = torch.ops.overflow_fast.scan_composite.default
DTYPES = [*FLOATS, *COMPLEX, *INTEGERS]


def slots_by(op, tensors):
    slots = torch.tensor([[-1, 0, 0, 0]] * len(tensors))
    op(slots, 0, tensors)
    return slots


def any_bits(dtype, numel, seed=0):
    """Elements with arbitrary bits: nans and infs of every sign among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator)
    values = bits.to(torch.uint8).view(dtype)
    if dtype.is_floating_point and dtype.itemsize > 1:
        values[1::7], values[5::11] = torch.inf, -torch.inf
    return values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slots_are_the_kernels_to_the_bit(dtype):
    base = any_bits(dtype, 24 * 10 * 18).view(24, 10, 18)
    tensors = [base, base.permute(2, 0, 1), base[3:17, 2:9, 1:16:3], base[:, 1, 3]]
    tensors += [base[:1].expand(6, 10, 18), base[0, 0, :1].expand(5), base[1, 1, 1]]
    tensors += [base.flatten().as_strided((30, 8), (3, 1)), base[:0], base[..., :1]]
    tensors += [tensor for _, tensor in layouts(dtype)]
    assert torch.equal(slots_by(BY_TORCH, tensors), slots_by(BY_KERNEL, tensors))


def test_conjugates_and_negatives_are_read_as_they_lie_in_memory():
    z = torch.tensor([complex(1, float("inf")), complex(-3, 4)]).conj()
    tensors = [z, z.imag, z[1:].imag]
    assert z.is_conj() and z.imag.is_neg()
    assert torch.equal(slots_by(BY_TORCH, tensors), slots_by(BY_KERNEL, tensors))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pieces_of_any_layout(dtype):
    base = any_bits(dtype, 300 * 7 * 100).view(300, 7, 100)
    tensors = [base, base.permute(2, 0, 1), base[::2, :, 3:], base.flatten()[5:]]
    assert torch.equal(slots_by(BY_TORCH, tensors), slots_by(BY_KERNEL, tensors))


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32], ids=str)
def test_a_tensor_of_more_than_64_mib(dtype):
    tensor = torch.ones((2**26 + 12345) // dtype.itemsize, dtype=dtype)
    tensor[-1] = 5
    if dtype.is_floating_point:
        tensor[7], tensor[-2] = torch.nan, -torch.inf
    assert torch.equal(slots_by(BY_TORCH, [tensor]), slots_by(BY_KERNEL, [tensor]))


def peak(function):
    """The most bytes that torch's CPU allocator has given out at once meanwhile."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        function()
    events = [
        e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"
    ]
    held = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_temporaries_are_no_larger_than_the_tensor(dtype):
    tensor = torch.zeros(2**20, dtype=torch.uint8).view(dtype)
    for each in (tensor, tensor.view(-1, 64).t()):
        assert peak(lambda t=each: slots_by(BY_TORCH, [t])) <= each.nbytes + 4096


def test_temporaries_of_a_large_tensor_end_at_64_mib():
    tensor = torch.zeros(2**27, dtype=torch.int8)
    assert peak(lambda: slots_by(BY_TORCH, [tensor])) <= 2**26 + 4096


class Backend:
    """Stands for a device that has no operation for some dtypes."""

    def __init__(self, *lacking):
        self.lacking, self.calls = lacking, []
        self.error = "not implemented\nwith details"

    def __call__(self, slots, first, tensors):
        self.calls.append([tensor.dtype for tensor in tensors])
        if any(tensor.dtype in self.lacking for tensor in tensors):
            raise NotImplementedError(self.error)
        BY_TORCH(slots, first, tensors)


@pytest.fixture
def backend():
    backend = Backend(torch.float16, torch.int8)
    _C.register_scan("cpu", backend)
    yield backend
    _C.register_scan("cpu", None)


TENSORS = [
    torch.tensor([1.0, -torch.inf]),
    torch.ones(2, dtype=torch.float16),
    torch.tensor([3.0]),
    torch.ones(2, dtype=torch.int8),
]


def test_what_a_backend_lacks_is_told_once_and_not_tried_again(
    backend, caplog, as_kept
):
    with caplog.at_level(logging.WARNING, "overflow_fast"):
        stats = [scan_with(TENSORS, _C.ScanBackend.DEVICE) for _ in range(3)]
    for low, half, high, byte in stats:
        assert (low.abs_max, high.abs_max) == (torch.inf, 3.0)
        as_kept(half.not_scanned)
        assert "Char on cpu" in byte.not_scanned
    assert [r.getMessage().split(": ")[1] for r in caplog.records] == [
        "Half on cpu",
        "Char on cpu",
    ]
    tried = sum(calls.count(torch.float16) for calls in backend.calls)
    assert tried == 2  # with its frame and alone
    float32 = [torch.float32]
    assert backend.calls[5:] == [float32] * 4


def test_memory_that_is_short_is_tried_again(backend):
    backend.error = "MPS backend out of memory"
    for _ in range(2):
        stat = scan_with(TENSORS[1:2], _C.ScanBackend.DEVICE)[0]
        assert "out of memory" in stat.not_scanned
    backend.lacking = ()
    assert scan_with(TENSORS[1:2], _C.ScanBackend.DEVICE)[0].abs_max == 1.0


def test_a_watched_model_goes_on_where_a_dtype_is_lacking(backend):
    model = torch.nn.Identity()
    detector = DebugUnderflowOverflow(model, _defer=True)
    for tensor in TENSORS[1:]:
        model(tensor)
    detector.check()
    assert sum(detector.coverage.not_scanned.values()) == 4
    with pytest.raises(ValueError, match="inf/nan detected"):
        model(TENSORS[0])


def test_a_frame_is_one_call(backend):
    backend.lacking = ()
    model = torch.nn.Linear(2, 2)
    DebugUnderflowOverflow(model, _defer=True)
    model(TENSORS[0].nan_to_num())
    assert len(backend.calls) == 1 and len(backend.calls[0]) == 4


def test_scan_says_why_on_the_cpu_as_well():
    assert scan(TENSORS, backend="composite")[1].not_scanned is None
