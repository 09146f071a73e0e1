"""One tensor that is kept: its memory, its version, and a copy of its contents."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ... import _C
from ...base.digests import INTEGERS
from ...base.tensors import COMPRESSED_LAYOUTS, PLAIN, has_memory, is_strided
from ...torch_internals.tensor_internals import (
    local_tensor,
    set_version,
    sparse_indices,
    sparse_values,
)

# Bytes of a tensor that is copied without being asked: on one core that takes 2.8 us,
# 1.2 us of which any copy takes. A larger weight that a forward writes to for the
# first time cannot be put back, which the report says.
SMALL = 2**16


class KeptTensor:
    """A tensor as it is now; restored in place, also where its `.data` was exchanged.

    Args:
        tensor: The tensor.
        is_copied: Copy the contents. Without a copy only a write is noticed.

    Attributes:
        tensor: The tensor itself.
    """

    def __init__(self, tensor: torch.Tensor, is_copied: bool) -> None:
        self.tensor = tensor
        self._requires_grad = tensor.requires_grad
        self._is_lazy = is_lazy(tensor)
        self._memory = memory_of(tensor)
        self._version = _C.version_of(tensor)
        self._copy: torch.Tensor | None = None
        is_readable = not (tensor.is_meta or self._is_lazy)
        is_own = self._memory is not None or (
            is_strided(tensor) and local_tensor(tensor) is None
        )
        if is_readable and is_own:
            is_readable = has_memory(tensor)
        if is_copied and is_readable:
            with contextlib.suppress(Exception):  # a layout without clone(), no memory
                self._copy = tensor.detach().clone()

    @property
    def copied(self) -> torch.Tensor | None:
        """The contents that were kept, or None without a copy."""
        return self._copy

    def restore(self, is_write: bool = False) -> str:
        """Makes the tensor what it was. Incurs a CPU-GPU sync if it is copied.

        Args:
            is_write: Count the restoration as a write, for autograd. Else the version
                is that of before, too.

        Returns:
            Why it stays changed, or "".
        """
        tensor = self.tensor
        if self._is_lazy and not is_lazy(tensor):
            return "it was not initialized before"
        if tensor.is_leaf and tensor.requires_grad != self._requires_grad:
            tensor.requires_grad_(self._requires_grad)
        if self._memory is not None and not is_at(tensor, self._memory):
            tensor.data = self._memory
        if self._copy is None:
            is_known = tensor.is_meta or self._is_lazy
            is_written = not is_known and self.is_written()
            return "it was written to, and there is no copy" if is_written else ""
        try:
            if not is_write:
                write(tensor, self._copy)
            elif self.has_changed():
                tensor.detach().copy_(self._copy)
        except Exception as error:  # a layout that cannot be written to
            is_same = not self.is_written()
            return "" if is_same else f"{type(error).__name__}: {error}"
        if not is_write and self.is_written() and self._version is not None:
            set_version(tensor, self._version)
        return ""

    def is_written(self) -> bool:
        """True if torch has counted a write since."""
        return _C.version_of(self.tensor) != self._version

    def was_moved(self) -> bool:
        """True if it has other memory: its `.data` was exchanged."""
        return self._memory is not None and not is_at(self.tensor, self._memory)

    def has_changed(self) -> bool:
        """True if the contents differ in a bit; without a copy, if it was written to.

        Incurs a CPU-GPU sync.
        """
        if self._copy is None:
            return self.is_written()
        return not is_same_bits(self._copy, self.tensor)


def write(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    """Copies into a tensor unseen by autograd, once where it is expanded.

    One that has these bits is left alone: its memory may be read-only, as that of a
    file that is mapped. Incurs a CPU-GPU sync.
    """
    if is_same_bits(copy, tensor):
        return
    if is_strided(tensor) and 0 in tensor.stride() and local_tensor(tensor) is None:
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dim] > 1:
                tensor, copy = tensor.narrow(dim, 0, 1), copy.narrow(dim, 0, 1)
    is_inference = tensor.is_inference()
    with torch.inference_mode() if is_inference else torch.no_grad():
        # The `.data` of another layout is no alias.
        (tensor.data if tensor.layout is torch.strided else tensor).copy_(copy)


def is_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors have the same bits; False if that is not known.

    A nan equals itself, and -0 does not equal 0. Incurs a CPU-GPU sync.
    """
    try:
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        pairs = zip(_parts(a), _parts(b), strict=True)
        return all(_are_same_bits(*pair) for pair in pairs)
    except Exception:  # a layout without accessible bytes, or without a shape
        return False


def memory_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """An alias of a plain tensor's memory, to be put back; None for others."""
    is_plain = type(tensor) in PLAIN
    if not is_plain or not is_strided(tensor) or tensor.is_meta:
        return None
    return None if is_lazy(tensor) else tensor.data


def num_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor with strided memory; 0 for others."""
    return tensor.nbytes if tensor.layout is torch.strided else 0


def is_at(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    """True if a tensor still is where it was, with the same shape."""
    if tensor.shape != memory.shape or tensor.dtype != memory.dtype:
        return False
    return tensor.data_ptr() == memory.data_ptr()


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold the bits of one of any layout, of a rank its own."""
    local = local_tensor(tensor)
    if local is not None:
        return _parts(local)
    if tensor.is_quantized:  # a view of it as integers may end the process
        return [tensor.int_repr(), tensor.dequantize()]
    if tensor.layout is torch.jagged:
        nested: Any = tensor
        parts = [nested.values(), nested.offsets(), nested.lengths()]
        return [each for each in parts if each is not None]
    if tensor.layout is torch.sparse_coo:
        return [sparse_indices(tensor), sparse_values(tensor)]
    if tensor.layout not in COMPRESSED_LAYOUTS:
        return [tensor]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def _are_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    flat = [each.detach().contiguous().view(-1) for each in (a, b)]
    places = [each.storage_offset() * each.itemsize for each in flat]
    # Eight bytes at once where they lie so: of bytes, it takes six times as long.
    is_whole = not any(place % 8 for place in (*places, flat[0].nbytes))
    kind = torch.int64 if is_whole else INTEGERS[flat[0].itemsize]
    return torch.equal(*(each.view(kind) for each in flat))
