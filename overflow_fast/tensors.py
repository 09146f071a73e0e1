"""Which tensors can be scanned, and where the values of a wrapper lie."""

from __future__ import annotations

from typing import Any

import torch

from . import _C


class NotScanned(str):
    """The reason why a tensor was not scanned."""


def _type_name(tensor: torch.Tensor) -> str:
    return type(tensor).__name__


def _values_of(tensor: torch.Tensor) -> torch.Tensor | NotScanned:
    """Finds the values of a tensor that has no strided memory of its own."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return NotScanned("inside a torch.func transform")
    if tensor.is_meta:
        return NotScanned("meta tensor")
    if hasattr(tensor, "fake_mode"):
        return NotScanned("fake tensor")
    if tensor.is_quantized:
        return NotScanned("quantized")
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    if tensor.layout in _COMPRESSED_LAYOUTS:
        return tensor.values()
    if tensor.is_nested:
        return _nested_values(tensor)
    local = getattr(tensor, "_local_tensor", None)  # DTensor
    if isinstance(local, torch.Tensor):
        return local if type(local) is torch.Tensor else _values_of(local)
    if _type_name(tensor) == "AsyncCollectiveTensor":
        # The stream waits for the collective, or the host where there is no stream.
        arrived: torch.Tensor = tensor.trigger_wait()  # type: ignore[attr-defined]
        return arrived
    if tensor._is_zerotensor():
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
    if getattr(tensor, "_lengths", None) is not None:
        return NotScanned("nested tensor with holes")
    values: torch.Tensor = tensor.values()
    return values


def resolve(tensor: torch.Tensor) -> torch.Tensor | NotScanned:
    """Finds what to scan for a tensor that the scan core could not read.

    Never raises: a tensor that cannot be understood yields the reason. Does not
    incur a CPU-GPU sync.
    """
    try:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            values = _values_of(tensor)
            if isinstance(values, NotScanned):
                return values
            values = values.detach()
    except Exception as error:
        return NotScanned(f"{_type_name(tensor)}: {error}")
    return values


def reason(tensor: torch.Tensor, readability: _C.Readability) -> NotScanned:
    """Says why a tensor with strided memory was not scanned."""
    if readability == _C.Readability.FREED:
        return NotScanned("its storage is freed")
    if readability == _C.Readability.UNSUPPORTED:
        return NotScanned(f"dtype {tensor.dtype}")
    return NotScanned(f"tensor subclass {_type_name(tensor)}")


def loss_in(output: Any) -> torch.Tensor | None:
    """Finds the loss in what a model returned: a floating-point scalar, or None.

    Dynamo traces it too.
    """
    if isinstance(output, torch.Tensor):
        return output if output.numel() == 1 and output.is_floating_point() else None
    if isinstance(output, (tuple, list)):
        for part in output:
            loss = loss_in(part)
            if loss is not None:
                return loss
        return None
    if isinstance(output, dict):
        return loss_in(output.get("loss"))
    return None if output is None else loss_in(getattr(output, "loss", None))
