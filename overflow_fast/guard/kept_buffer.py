"""One buffer at a step's beginning: which tensor it was, and its contents."""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..torch_internals.module_internals import BUFFERS, PARAMETERS
from ..torch_internals.tensor_internals import version_of

# Tensors of at most this many bytes are copied in each step. A larger one is copied
# only once a change has been seen; it is compared after steps 1, 2, 4, 8, ...
_SMALL = 2**16
# Larger frozen parameters are not copied before a change has been seen.
_MAX_FROZEN = 2**20


class KeptBuffer:
    """One entry of a module's buffers or frozen parameters, to be put back.

    Args:
        module: The module. It is held weakly.
        table: The attribute of the module that holds it: its buffers or parameters.
        name: Its name there.

    Attributes:
        slot: Identifies the entry: the module's id, and the name.
        copy: The copy of its contents, or None.
        tensor: The tensor, from the step's beginning to its end.
    """

    def __init__(self, module: nn.Module, table: str, name: str) -> None:
        self.module = weakref.ref(module)
        self.slot = id(module), name
        self.table = table
        self.name = name
        self.copy: torch.Tensor | None = None
        self.tensor: torch.Tensor | None = None
        self._copied: weakref.ref[torch.Tensor] | None = None  # the copy's original
        self._version: int | None = None
        self._home: weakref.ref[torch.Tensor] | None = None  # the last step's tensor
        self._changes = False
        self._is_replaced = False
        self._is_written = False  # in place, by this step's forward
        self._memory: torch.Tensor | None = None  # the tensor's memory
        self._was_lazy = False

    def begin(self, tensor: torch.Tensor | None) -> None:
        """Notes which tensor the entry holds now."""
        self.tensor = tensor
        self._was_lazy = tensor is not None and is_lazy(tensor)
        self._is_written = False
        self._memory = None
        if tensor is not None and not self._was_lazy and _has_pointer(tensor):
            self._memory = tensor.data
        if self._home is None and tensor is not None:
            self._home = weakref.ref(tensor)

    def needs_copy(self) -> bool:
        """Returns True if the contents have to be copied for this step."""
        tensor = self.tensor
        if tensor is None or self._was_lazy or tensor.is_meta:
            self.copy = self._copied = None
            return False
        version = _version_of(tensor)
        if not self._is_certain:
            is_known = self._copied is not None and self._copied() is tensor
            if is_known and version is not None and version == self._version:
                return False
            if self.table == PARAMETERS and _num_bytes(tensor) > _MAX_FROZEN:
                self._remember(version)
                self.copy = None
                return False
        self._remember(version)
        return True

    def _remember(self, version: int | None) -> None:
        assert self.tensor is not None
        self._copied, self._version = weakref.ref(self.tensor), version

    def end_forward(self) -> None:
        """Notes whether a forward has written to the tensor."""
        if self.tensor is not None and not self._was_lazy:
            self._is_written |= _version_of(self.tensor) != self._version

    def end(self, compares: bool) -> None:
        """Notes whether a step has changed it.

        Args:
            compares: Compare the contents with the copy, which syncs.
        """
        before, now, self.tensor = self.tensor, self._current(), None
        self._memory = None
        self._home = None if now is None else weakref.ref(now)
        if before is None:
            return
        if now is not before:
            self._is_replaced = True
        elif not self._changes and not self._was_lazy and not before.is_meta:
            is_written = _version_of(before) != self._version
            self._changes = is_written or (compares and not self._is_same(before))

    def restore(self) -> str:
        """Puts it back. Returns why that failed, or ""."""
        module, before = self.module(), self.tensor
        if module is None:
            return ""
        if self._was_lazy:
            return _reset(module)
        now = self._current()
        if now is not before:
            self._put_in_place(module, now, before)
        if before is None or before.is_meta:
            return ""
        if self._memory is not None and _pointer(before) != _pointer(self._memory):
            before.data = self._memory
        elif now is before and not self._is_replaced:
            pass
        elif not self._is_written:
            return ""  # other code owns its contents since: a batch, say
        return self._restore_contents(module, before)

    def _restore_contents(self, module: nn.Module, before: torch.Tensor) -> str:
        is_written = _version_of(before) != self._version
        if self.copy is None:
            return "it is large, and had not changed before" if is_written else ""
        if self._is_same(before):
            return ""
        if not is_written and not self._is_certain:
            return "it was written to without a version change, now or earlier"
        try:
            _write(before, self.copy)
        except Exception:  # a layout that cannot be written to
            module.__dict__[self.table][self.name] = _like(before, self.copy.clone())
        self._remember(_version_of(before))
        return ""

    def _put_in_place(
        self, module: nn.Module, now: torch.Tensor | None, before: torch.Tensor | None
    ) -> None:
        # functional_call puts tensors in place for one call, and removes them itself.
        is_home = now is not None and self._home is not None and self._home() is now
        is_plain = all(type(each) is nn.Parameter for each in (now, before))
        if not is_home and (is_plain or self.table == BUFFERS):
            module.__dict__[self.table][self.name] = before

    @property
    def _is_certain(self) -> bool:
        """Returns True if the copy is of this step, False if it may be older."""
        assert self.tensor is not None
        return self._changes or _num_bytes(self.tensor) <= _SMALL

    def restore_where(self, flag: torch.Tensor) -> None:
        """Puts the contents back where a flag on the device is not 0."""
        now = self._current()
        if now is None or now is not self.tensor or self.copy is None:
            return
        if self._is_replaced or now.is_meta:
            return
        if self._is_certain or _version_of(now) != self._version:
            is_bad = flag.to(now.device, non_blocking=True) != 0
            now.data.copy_(torch.where(is_bad, self.copy, now))

    def _current(self) -> torch.Tensor | None:
        module = self.module()
        table = {} if module is None else module.__dict__[self.table]
        found: torch.Tensor | None = table.get(self.name)
        return found

    def _is_same(self, tensor: torch.Tensor) -> bool:
        """Returns True if the copy equals a tensor in every bit."""
        copy = self.copy
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            return copy is None
        try:
            return torch.equal(_bits(copy), _bits(tensor))
        except Exception:  # a layout without accessible bytes
            return False


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: a nan equals itself, and -0 does not equal 0."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _write(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    """Copies into a tensor, once where it is expanded."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor, copy = tensor.narrow(dim, 0, 1), copy.narrow(dim, 0, 1)
    tensor.data.copy_(copy)  # autograd may have saved it, and must not see a write


def _like(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copy, requires_grad=False)
    return copy


def _has_pointer(tensor: torch.Tensor | None) -> bool:
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    return is_plain and tensor is not None and tensor.layout is torch.strided


def _pointer(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes if tensor.layout is torch.strided else 0


def _version_of(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else version_of(tensor)


def _reset(module: nn.Module) -> str:
    """Resets lazy statistics that the forward has initialized."""
    reset = getattr(module, "reset_running_stats", None)
    if reset is None:
        return "it was not initialized before this step"
    reset()
    return ""
