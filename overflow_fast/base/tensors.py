"""Tensors that can be scanned: their memory, devices, copies and digests."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn

from .. import _C
from ..torch_internals.tensor_internals import (
    arrived,
    copy_all,
    has_holes,
    is_fake,
    is_in_transform,
    is_zero_tensor,
    local_tensor,
    sparse_values,
    storage_of,
)
from .modules import tensors_of
from .tree import INDEX, Part, children, tensors_in


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


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor to memory of its own on the host, as safetensors writes it.

    It refuses tensors that share memory, and writes a conjugate as it lies.
    """
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format)


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


def model_loss_in(output: Any) -> torch.Tensor | None:
    """The loss in what a model returned: a scalar that is no output beside others.

    One of a tuple or list, such as an auxiliary loss or the value of a state, is the
    loss only if it is computed from what was returned with it; [1, 1] is one sample's.
    """
    loss = loss_in(output)
    loss = None if loss is not None and loss is output and loss.dim() > 1 else loss
    if loss is None or loss.grad_fn is None or not isinstance(output, tuple | list):
        return loss
    from .graph import leads_to  # few models return a scalar among others

    beside = [each for each in tensors_in(output) if each is not loss]
    others = [each.grad_fn for each in beside if each.grad_fn is not None]
    return loss if not others or leads_to(loss.grad_fn, others) else None


def _may_be_loss(part: Part) -> bool:
    return part.style == INDEX or (type(part.value) is str and part.value == "loss")


_MOST_VALUES = 10_000  # that are looked through for a loss; chosen, not measured


def traced_loss_in(output: Any) -> Any:
    """Stands for `loss_in` where dynamo traces it, without running code to inspect it.

    Returns:
        The loss, or None.
    """
    if isinstance(output, torch.Tensor):
        is_number = output.numel() == 1 and output.dim() < 2
        return output if is_number and output.is_floating_point() else None
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


# The devices that a program runs on, as operators know them.


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


# Digests of tensors: equal bits in equal places, or not.


_MULTIPLIER = -7046029254386353131  # 2**64 divided by the golden ratio, as int64
_CHUNK = 2**22  # elements: bounds the temporaries
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(tensor: torch.Tensor) -> torch.Tensor:
    """Computes a 64-bit digest of a tensor's bits that depends on their positions.

    The sum of (bits + 1) * (position * M | 1) modulo 2**64 with the odd multiplier M of
    Fibonacci hashing (Knuth, The Art of Computer Programming 3, 6.4). It tells any one
    changed element, and elements that changed places. Does not incur a CPU-GPU sync.

    Args:
        tensor: Any strided tensor; of complex numbers, both parts count.

    Returns:
        An int64 scalar on the tensor's device.
    """
    values = real_parts(tensor.detach())
    bits = values.contiguous().view(INTEGERS[values.element_size()]).flatten()
    digest = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin in range(0, len(bits), _CHUNK):
        part = bits[begin : begin + _CHUNK].to(torch.int64)
        places = torch.arange(begin, begin + len(part), device=bits.device)
        digest += ((part + 1) * (places * _MULTIPLIER).bitwise_or_(1)).sum()
    return digest


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


# Copies of many tensors, in the memory of earlier copies.


def copy_tensors(
    tensors: Sequence[torch.Tensor], earlier: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Copies tensors, with few kernels. Does not incur a CPU-GPU sync.

    Args:
        tensors: The tensors, of any shapes, dtypes and devices.
        earlier: An earlier copy for each, or None. Its memory is reused if it has the
            same shape, dtype, device and layout.

    Returns:
        The copies, in the order of the tensors.
    """
    if not tensors:
        return []
    copies: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    with torch.no_grad():
        for tensor, copy in zip(tensors, earlier, strict=True):
            if copy is None or not _can_hold(copy, tensor):
                copy = tensor.detach().clone()
            else:
                targets.append(copy)
                sources.append(tensor)
            copies.append(copy)
        if targets:
            copy_all(targets, sources)
    return copies


def _can_hold(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    own, its = (
        (each.shape, each.dtype, each.device, each.layout) for each in (copy, tensor)
    )
    # Outside of inference mode an inference tensor cannot be written to.
    return own == its and copy.layout is torch.strided and not copy.is_inference()
