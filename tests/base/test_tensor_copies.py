"""Copies of tensors in the memory of earlier copies."""

import pytest
import torch

from overflow_fast.base.tensor_copies import copy_tensors


def test_the_memory_of_an_earlier_copy_is_used_again():
    tensors = [torch.arange(4.0), torch.tensor(3)]
    first = copy_tensors(tensors, [None, None])
    tensors[0] += 1
    second = copy_tensors(tensors, first)
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert second[0].equal(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert second[0].data_ptr() != tensors[0].data_ptr()


@pytest.mark.parametrize(
    "earlier",
    [torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(2).to_sparse()],
)
def test_a_copy_of_another_kind_is_not_written_to(earlier):
    before = earlier.clone()
    tensor = torch.tensor([1.0, 2.0])
    (copy,) = copy_tensors([tensor], [earlier])
    assert copy is not earlier and copy.equal(tensor)
    assert earlier.to_dense().equal(before.to_dense())


def test_an_inference_tensors_copy_can_be_replaced():
    with torch.inference_mode():
        tensor = torch.ones(2)
        earlier = torch.zeros(2)
    for _ in range(2):
        (earlier,) = copy_tensors([tensor], [earlier])
        assert earlier.equal(torch.ones(2))


def test_gradients_are_not_recorded():
    parameter = torch.nn.Parameter(torch.ones(2))
    (copy,) = copy_tensors([parameter], [torch.zeros(2)])
    assert not copy.requires_grad and copy.equal(torch.ones(2))


class Sharded(torch.Tensor):
    """A subclass without operators for lists of tensors, as DTensor is."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch._foreach_copy_:
            raise NotImplementedError
        return super().__torch_function__(function, types, args, kwargs)


def test_a_subclass_without_operators_for_lists_is_copied():
    tensors = [torch.ones(2), torch.ones(2).as_subclass(Sharded)]
    first = copy_tensors(tensors, [None, None])
    for tensor in tensors:
        tensor += 1
    second = copy_tensors(tensors, first)
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert [each.tolist() for each in second] == [[2.0, 2.0]] * 2
