"""Private APIs of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree

from .registry import (
    INTERNALS,
    MISSING,
    Internal,
    direct,
    internal,
    listed,
    note_missing,
)


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


# True for a tensor that torch.func has wrapped.
is_in_transform: Callable[[torch.Tensor], bool] = direct(
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "tensors inside torch.func transforms have no memory of their own",
    "Tensors inside torch.func transforms are not scanned, for another reason",
    False,
)


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


# The indices of a sparse COO tensor, in the order of its values.
sparse_indices: Callable[[torch.Tensor], torch.Tensor] = direct(
    "torch.Tensor._indices",
    "indices of sparse tensors as they are; indices() wants them coalesced",
    "Sums of sparse gradients are not explained",
)


# The values of a sparse COO tensor, which may have several for one place.
sparse_values: Callable[[torch.Tensor], torch.Tensor] = direct(
    "torch.Tensor._values",
    "values of sparse tensors as they are; values() wants them coalesced",
    "Sparse COO tensors are listed as not scanned",
)


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


# The hooks behind a parameter's accumulated gradient, to be set aside, or None.
gradient_hooks: Callable[[torch.Tensor], dict[int, Any] | None] = direct(
    "torch.Tensor._post_accumulate_grad_hooks",
    "an optimizer that steps behind the gradient must not step in a replay",
    "Steps cannot be replayed",
)


@internal(
    "torch._C._autograd._unsafe_set_version_counter",
    "a restored value is no write to the tensor",
    "A replay raises the version counters of buffers",
)
def set_version(tensor: torch.Tensor, version: int) -> None:
    """Sets the number of writes to a tensor."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


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


# Tensors that ranks share.


@listed(
    "torch.distributed.tensor.DTensor._local_tensor",
    "a rank's own part of a DTensor, without a collective",
    "DTensors are not scanned",
)
def local_tensor(tensor: object) -> torch.Tensor | None:
    """This rank's part of a DTensor; None for any other tensor."""
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, torch.Tensor) else None


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    local = local_tensor(tensor)
    return tensor if local is None else local


@internal(
    "torch.distributed._functional_collectives.AsyncCollectiveTensor",
    "a collective's result that has not been waited for",
    "Such tensors are listed as not scanned",
)
def arrived(tensor: Any) -> torch.Tensor | None:
    """The result of a collective that may still run; None for any other tensor.

    The stream waits for it, or the host where there is no stream.
    """
    if type(tensor).__name__ != "AsyncCollectiveTensor":
        return None
    result: torch.Tensor = tensor.trigger_wait()
    return result


@listed(
    "torch.distributed.tensor.DTensor._spec",
    "the ranks that a DTensor is shared by",
    "Pass process_group= for models of DTensors",
)
def mesh_of(tensor: torch.Tensor) -> Any:
    """The device mesh of a DTensor, or None.

    DDP has local tensors in its place between two forwards.
    """
    spec = getattr(tensor, "_spec", None) or getattr(tensor, "_st_info", None)
    return getattr(spec, "mesh", None)


# Its number, which no other storage has that is alive.
storage_number: Callable[[torch.UntypedStorage], int] = direct(
    "torch.UntypedStorage._cdata",
    "two Python objects may stand for one storage",
    "Steps cannot be replayed",
)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor's values, in a wrapper such as DTensor too, if any."""
    if type(tensor) not in _PLAIN:
        tensor = local_part(tensor)
    if tensor.layout is torch.sparse_coo:
        tensor = sparse_values(tensor)
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a layout without one, a transform
        return None


_PLAIN = torch.Tensor, torch.nn.Parameter  # those of torch's own


pytree = torch.utils._pytree
INTERNALS["pytree"] = Internal(
    "torch.utils._pytree.SUPPORTED_NODES",
    "what classes that libraries register hold; nested values in compiled code",
    "The package cannot work without it",
)
