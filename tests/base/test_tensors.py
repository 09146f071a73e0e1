"""Memory that is there, and memory that is not."""

import pytest
import torch

from overflow_fast.base.tensors import has_memory


def freed(part=slice(None)):
    tensor = torch.ones(4)
    view = tensor[part]
    tensor.untyped_storage().resize_(0)
    return view


TENSORS = {
    "plain": (torch.ones(3, 2), True),
    "expanded": (torch.ones(1).expand(5), True),
    "a view": (torch.ones(6)[4:], True),
    "transposed": (torch.ones(2, 3).T, True),
    "empty": (torch.ones(0), True),
    "a number": (torch.ones(()), True),
    "freed": (freed(), False),
    "a view of freed memory": (freed(slice(2, None)), False),
    "meta": (torch.ones(2, device="meta"), False),
    "sparse": (torch.ones(2).to_sparse(), False),
}


@pytest.mark.parametrize("name", TENSORS)
def test_memory_can_be_read_or_not(name):
    tensor, wanted = TENSORS[name]
    assert has_memory(tensor) is wanted
