"""The operators registered with torch's dispatcher."""

import pytest
import torch

import overflow_fast  # noqa: F401

OPS = [torch.ops.overflow_fast.scan, torch.ops.overflow_fast.scan_composite]

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def empty_slots(count):
    slots = torch.zeros(count, 4, dtype=torch.int64)
    slots[:, 0] = -1
    return slots


@pytest.mark.parametrize("op", OPS, ids=str)
def test_opcheck(op):
    tensors = [torch.randn(5), torch.ones(3, 4, dtype=torch.float16)]
    torch.library.opcheck(op.default, (empty_slots(4), 1, tensors))
    tensors[0].requires_grad_()
    torch.library.opcheck(op.default, (empty_slots(4), 1, tensors))


@pytest.mark.parametrize("device", DEVICES)
def test_both_operators_write_the_same_slots(device):
    tensors = [
        torch.tensor([1.0, -float("inf"), float("nan"), float("inf")]),
        torch.tensor([-(2**63), 5]),
        torch.zeros(0),
        torch.tensor([3 + 4j, complex(float("-inf"), float("inf"))]),
    ]
    tensors = [tensor.to(device) for tensor in tensors]
    for _ in range(2):
        slots = [empty_slots(5).to(device), empty_slots(5).to(device)]
        for op, into in zip(OPS, slots, strict=True):
            op(into, 1, tensors)
            op(into, 1, tensors)
        assert torch.equal(*slots)
    assert slots[0][1].tolist() == [0x3F800000, 0x7FC00000, 2, (4 << 2) | 3]
    assert slots[0][0].tolist() == [-1, 0, 0, 0]


@pytest.mark.parametrize("op", OPS, ids=str)
def test_wrong_arguments(op, as_kept):
    tensors = [torch.ones(2)]
    as_kept.error(TypeError, op, torch.zeros(4, 4), 0, tensors)
    as_kept.error(ValueError, op, torch.zeros(4, 3, dtype=torch.int64), 0, tensors)
    as_kept.error(IndexError, op, empty_slots(4), 4, tensors)
    as_kept.error(TypeError, op, empty_slots(4), 0, [torch.ones(2).to_sparse()])
