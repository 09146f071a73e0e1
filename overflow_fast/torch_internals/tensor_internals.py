"""Private APIs of tensors."""

from __future__ import annotations

import torch
import torch.utils._pytree

from .registry import INTERNALS, MISSING, Internal, internal, listed, note_missing


@internal(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    "the inner tensors of wrapper subclasses",
    "Wrapper subclasses are not scanned",
    False,
)
def is_wrapper(tensor: object) -> bool:
    """Returns True for a wrapper subclass that flattens into inner tensors."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(tensor)


@internal(
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "tensors inside torch.func transforms have no memory of their own",
    "Tensors inside torch.func transforms are not scanned, for another reason",
    False,
)
def is_in_transform(tensor: torch.Tensor) -> bool:
    """Returns True for a tensor that torch.func has wrapped."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


@internal(
    "torch._C._functorch.is_batchedtensor",
    "tensors inside vmap cannot be given to an operator",
    "Compiled vmap may fail under the guard",
    False,
)
def is_batched(tensor: torch.Tensor) -> bool:
    """Returns True for a tensor inside vmap."""
    return torch._C._functorch.is_batchedtensor(tensor)


@internal(
    "torch.Tensor._is_zerotensor",
    "zeros of autograd's that have no memory",
    "Such tensors are listed as not scanned",
    False,
)
def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Returns True for zeros that have no memory."""
    return tensor._is_zerotensor()


@internal(
    "torch.Tensor._values",
    "values of sparse tensors as they are; values() wants them coalesced",
    "Sparse COO tensors are listed as not scanned",
)
def sparse_values(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a sparse COO tensor, which may have several for one place."""
    return tensor._values()


@listed(
    "torch._subclasses.fake_tensor.FakeTensor",
    "tensors without values; importing the class takes a second",
    "Fake tensors are listed as not scanned, for another reason",
)
def is_fake(tensor: object) -> bool:
    """Returns True for a fake tensor."""
    return hasattr(tensor, "fake_mode")


@listed(
    "torch.nested._internal.nested_tensor.NestedTensor",
    "memory between the parts of a jagged tensor that belongs to none",
    "Values there may be reported",
)
def has_holes(tensor: torch.Tensor) -> bool:
    """Returns True for a jagged tensor whose parts do not fill its values."""
    return getattr(tensor, "_lengths", None) is not None


@internal(
    "torch.Tensor._post_accumulate_grad_hooks",
    "parameters that a backward may step, whose copies are put back",
    "A self-test may leave a step that a hook has made in backward",
    True,
)
def may_step_in_backward(parameter: torch.Tensor) -> bool:
    """Returns True for a parameter with hooks that run when its gradient is there."""
    return bool(parameter._post_accumulate_grad_hooks)


@listed(
    "torch._foreach_copy_",
    "few kernels for many buffers",
    "Buffers are copied one by one",
)
def copy_all(to: list[torch.Tensor], of: list[torch.Tensor]) -> None:
    """Copies tensors into others of the same shapes, in few kernels."""
    try:
        torch._foreach_copy_(to, of)
        return
    except NotImplementedError:
        pass  # of a subclass without this operator, such as DTensor
    except MISSING as error:
        note_missing("copy_all", error)
    for target, source in zip(to, of, strict=True):
        target.copy_(source)


pytree = torch.utils._pytree
INTERNALS["pytree"] = Internal(
    "torch.utils._pytree.SUPPORTED_NODES",
    "what classes that libraries register hold; nested values in compiled code",
    "The package cannot work without it",
)
