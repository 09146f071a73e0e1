"""A digest tells any changed bit and place."""

import pytest
import torch

from overflow_fast.base.digests import digest_of

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64),
    *(torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint8),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_digest_tells_any_changed_bit_and_place(dtype):
    values = torch.arange(7).remainder(5).to(dtype).reshape(7, 1)
    digest = int(digest_of(values))
    assert int(digest_of(values.clone())) == digest
    assert int(digest_of(values.expand(7, 2)[:, :1])) == digest
    swapped = values.clone()
    swapped[[0, 1]] = values[[1, 0]]
    changed = values.clone()
    changed.view(torch.uint8).flatten()[3] ^= 1
    assert len({digest, int(digest_of(swapped)), int(digest_of(changed))}) == 3


def test_a_digest_tells_zeros_nans_and_signs_apart():
    zero, nan = torch.zeros(3), torch.full((3,), float("nan"))
    other = nan.clone()
    other.view(torch.int32)[1] |= 1
    tensors = [zero, -zero, torch.zeros(4), zero[:0], nan, other]
    assert len({int(digest_of(each)) for each in tensors}) == len(tensors)


def test_a_digest_is_of_the_whole_tensor(monkeypatch):
    values = torch.randn(100)
    whole = int(digest_of(values))
    monkeypatch.setattr("overflow_fast.base.digests._CHUNK", 7)
    assert int(digest_of(values)) == whole
