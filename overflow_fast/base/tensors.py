"""Tensors that can be scanned: their memory, their numbers, their devices."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable
from typing import TypeGuard

import torch
from torch import nn

from .. import _C
from ..torch_internals.tensor_internals import (
    arrived,
    has_holes,
    is_fake,
    is_in_transform,
    is_zero_tensor,
    local_tensor,
    sparse_values,
    storage_of,
)
from .modules import tensors_of


def dtype_named(name: str) -> torch.dtype | None:
    """The dtype of a name such as "float16"; None for one that this torch lacks."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


class NotScanned(str):
    """The reason why a tensor was not scanned."""


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
    if tensor.layout in COMPRESSED_LAYOUTS:
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
        return NotScanned(f"tensor subclass {type(tensor).__name__}")
    return NotScanned(f"layout {tensor.layout}")


COMPRESSED_LAYOUTS = {
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
        return NotScanned(f"{type(tensor).__name__}: {error}")
    return values


def reason(tensor: torch.Tensor, readability: _C.Readability) -> NotScanned:
    """Returns why a tensor with strided memory was not scanned."""
    if readability == _C.Readability.FREED:
        return NotScanned("its storage is freed")
    if readability == _C.Readability.UNSUPPORTED:
        return NotScanned(f"dtype {tensor.dtype}")
    return NotScanned(f"tensor subclass {type(tensor).__name__}")


def is_strided(tensor: torch.Tensor) -> bool:
    """True for a tensor with a shape and strides; a nested one has none."""
    return tensor.layout is torch.strided and not tensor.is_nested


def sizes_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor; () for a nested one, whose sizes are no numbers."""
    return () if tensor.is_nested else tuple(tensor.shape)


def has_memory(tensor: torch.Tensor) -> bool:
    """True if a plain strided tensor can be read: its storage is not freed."""
    if not is_strided(tensor) or tensor.is_meta:
        return False
    try:
        size = tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):  # a wrapper without a storage
        return False
    return size >= extent_of(tensor)[1] or not tensor.numel()


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its memory where a strided tensor begins and ends."""
    begin = end = int(tensor.storage_offset())
    if tensor.numel():
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        end += 1 + sum((size - 1) * stride for size, stride in pairs)
    return begin * tensor.itemsize, end * tensor.itemsize


HALF = (torch.float16, torch.bfloat16)
# The types whose operations are torch's own; an `nn.Buffer` is a plain tensor.
PLAIN = (torch.Tensor, nn.Parameter)


def are_plain(tensors: Iterable[torch.Tensor]) -> bool:
    """True for tensors of torch's own classes: of others code may be the program's."""
    return all(type(each) in PLAIN for each in tensors)


def is_readable(tensor: torch.Tensor) -> bool:
    """True for a tensor or parameter of torch's own, whose memory is there."""
    return type(tensor) in PLAIN and has_memory(tensor)


def place_of(device: torch.device) -> str:
    """Names a device and its host, with the UUID of a GPU."""
    host = socket.gethostname()
    if device.type != "cuda":
        return f"{device} of host {host}"
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", "unknown")
    return f"{device} ({properties.name}, UUID {uuid}) of host {host}"


def devices_of(models: Iterable[nn.Module]) -> list[torch.device]:
    """The devices besides the CPU that hold parameters or buffers."""
    found = {tensor.device for model in models for tensor in tensors_of(model)}
    return sorted((d for d in found if d.type not in ("cpu", "meta")), key=str)


def is_number(value: object) -> TypeGuard[float]:
    """True for an int or a float, which a bool is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_number(argument: str, value: object) -> None:
    """Raises TypeError if an argument is no number."""
    if not is_number(value):
        raise TypeError(f"{argument} must be a number, got {type(value).__name__}")


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """The values in a dtype that has all operations: float8 has few."""
    values = tensor.detach()
    is_float8 = values.is_floating_point() and values.itemsize == 1
    return values.float() if is_float8 else values


def real_parts(values: torch.Tensor) -> torch.Tensor:
    """Views complex numbers as pairs of real ones; other values are as they are."""
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def kinds_in(values: torch.Tensor) -> int:
    """The kinds of non-finite values, as bits, by torch's operations. Incurs a sync.

    Args:
        values: Values of a dtype that has all operations; see `widened()`.
    """
    parts = real_parts(values)
    flags = torch.stack(
        [parts.isnan().any(), (parts == math.inf).any(), (parts == -math.inf).any()]
    ).tolist()
    nan, positive, negative = map(int, flags)
    return _C.NAN * nan | _C.POSITIVE_INF * positive | _C.NEGATIVE_INF * negative


def signs_of(kinds: int) -> str:
    """Returns the signs of the infs among kinds: "+", "-", "+-", or ""."""
    return "+" * bool(kinds & _C.POSITIVE_INF) + "-" * bool(kinds & _C.NEGATIVE_INF)


def is_whole(tensor: torch.Tensor) -> bool:
    """True if a tensor has an element for all of its memory."""
    storage = storage_of(tensor)
    return storage is None or storage.nbytes() == tensor.numel() * tensor.itemsize
