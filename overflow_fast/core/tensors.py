"""The tensors that can be scanned, and the values of wrappers."""

from __future__ import annotations

from typing import Any

import torch

from .. import _C
from ..torch_internals.tensor_internals import (
    has_holes,
    is_fake,
    is_in_transform,
    is_zero_tensor,
    sparse_values,
)
from ..torch_internals.wrappers import arrived, local_tensor
from ..tree import INDEX, Part, children


def dtype_named(name: str) -> torch.dtype | None:
    """The dtype of a name such as "float16"; None for one that this torch lacks."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


class NotScanned(str):
    """The reason why a tensor was not scanned."""


def _type_name(tensor: torch.Tensor) -> str:
    return type(tensor).__name__


def _values_of(tensor: torch.Tensor) -> torch.Tensor | NotScanned:
    """Finds the values of a tensor that has no strided memory of its own."""
    if is_in_transform(tensor):
        return NotScanned("inside a torch.func transform")
    if tensor.is_meta:
        return NotScanned("meta tensor")
    if is_fake(tensor):
        return NotScanned("fake tensor")
    if tensor.is_quantized:
        return NotScanned("quantized")
    if tensor.layout is torch.sparse_coo:
        return sparse_values(tensor)
    if tensor.layout in _COMPRESSED_LAYOUTS:
        return tensor.values()
    if tensor.is_nested:
        return _nested_values(tensor)
    local = local_tensor(tensor)
    if local is not None:
        return local if type(local) is torch.Tensor else _values_of(local)
    result = arrived(tensor)
    if result is not None:
        return result
    if is_zero_tensor(tensor):
        return torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return NotScanned(f"tensor subclass {_type_name(tensor)}")
    return NotScanned(f"layout {tensor.layout}")


_COMPRESSED_LAYOUTS = {
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
}


def _nested_values(tensor: torch.Tensor) -> torch.Tensor | NotScanned:
    if has_holes(tensor):
        return NotScanned("nested tensor with holes")
    values: torch.Tensor = tensor.values()
    return values


def resolve(tensor: torch.Tensor) -> torch.Tensor | NotScanned:
    """Finds the values to scan of a tensor that the scan core could not read.

    Never raises: a tensor that cannot be understood yields the reason. Does not
    incur a CPU-GPU sync.
    """
    try:
        with _C.Hidden(), torch.no_grad():
            values = _values_of(tensor)
            if isinstance(values, NotScanned):
                return values
            values = values.detach()
    except Exception as error:
        return NotScanned(f"{_type_name(tensor)}: {error}")
    return values


def reason(tensor: torch.Tensor, readability: _C.Readability) -> NotScanned:
    """Returns why a tensor with strided memory was not scanned."""
    if readability == _C.Readability.FREED:
        return NotScanned("its storage is freed")
    if readability == _C.Readability.UNSUPPORTED:
        return NotScanned(f"dtype {tensor.dtype}")
    return NotScanned(f"tensor subclass {_type_name(tensor)}")


def has_memory(tensor: torch.Tensor) -> bool:
    """Tells whether a plain strided tensor can be read: its storage is not freed."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return False
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in pairs)
    needed = (last + 1) * tensor.itemsize
    try:
        return tensor.untyped_storage().nbytes() >= needed or not tensor.numel()
    except (RuntimeError, NotImplementedError):  # a wrapper without a storage
        return False


def loss_in(output: Any) -> torch.Tensor | None:
    """Finds the loss in what a model returned: a floating-point scalar, or None.

    Runs none of the user's code: no property is evaluated, and of a dict or an object
    only what it holds counts. Never raises.
    """
    if type(output) is torch.Tensor:
        return output if _is_loss(output) else None
    try:
        return _loss_in(output)
    except Exception:
        return None


def _loss_in(output: Any) -> torch.Tensor | None:
    waiting, opened = [output], dict[int, Any]()
    for _ in range(_MOST_VALUES):
        if not waiting:
            break
        value = waiting.pop()
        if issubclass(type(value), torch.Tensor):
            if _is_loss(value):
                found: torch.Tensor = value
                return found
        elif id(value) not in opened:  # a list may hold itself
            opened[id(value)] = value
            parts = [each for part, each in children(value) or () if _may_be_loss(part)]
            waiting += reversed(parts)
    return None


def _is_loss(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 1 and tensor.is_floating_point()


def _may_be_loss(part: Part) -> bool:
    return part.style == INDEX or (type(part.value) is str and part.value == "loss")


_MOST_VALUES = 10_000


def traced_loss_in(output: Any) -> Any:
    """Stands for `loss_in` where dynamo traces it, without running code to inspect it.

    Returns:
        The loss, or None.
    """
    if isinstance(output, torch.Tensor):
        return output if output.numel() == 1 and output.is_floating_point() else None
    if isinstance(output, (tuple, list)):
        for part in output:
            loss = traced_loss_in(part)
            if loss is not None:
                return loss
        return None
    if isinstance(output, dict):
        return traced_loss_in(output.get("loss"))
    if output is None or isinstance(getattr(type(output), "loss", None), property):
        return None
    # Not by getattr(): a `__getattr__` of the user's would run.
    own = getattr(output, "__dict__", None)
    return traced_loss_in(own.get("loss")) if own else None
