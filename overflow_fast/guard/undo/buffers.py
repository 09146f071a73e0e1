"""Buffers and frozen parameters as they were when a step began.

Frozen parameters are kept with the buffers since they may hold statistics, which a
forward updates by `.data`. Of each place in a module is known which tensor it held when
the step began, and mostly a copy of the contents:

1. A small tensor, and one that was seen to change, is copied in each step: its copy is
   certain. A large one is copied once. A write that torch does not count may have come
   behind that copy: such a tensor is not restored, which the report says.
2. A step that is undone may find another tensor in the place. If a forward has put it
   there, the one of the beginning comes back. If other code has, it stays. If it is the
   one of the last step, it stays, too: `functional_call` had another one there for the
   forward.
3. The contents are written back only where the step's forwards may have changed them. A
   tensor that an earlier forward has put there, such as a part of its batch, belongs to
   other code, unless this step's forward has written to it.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ... import _C
from ...torch_internals.module_internals import BUFFERS, PARAMETERS
from .tensors import SMALL, is_at, is_same_bits, memory_of, num_bytes, write

# Bytes. Larger frozen parameters are not copied before a change has been seen: most are
# the weights of a model that adapters train, which a copy would hold twice. The first
# step that changes such a one cannot be undone, which the report says.
_MAX_FROZEN = 2**20


class KeptBuffer:
    """One of a module's buffers or frozen parameters.

    Args:
        module: The module. It is held weakly.
        table: The attribute of the module that holds it: its buffers or parameters.
        name: Its name there.

    Attributes:
        slot: Identifies the place: the module's id, and the name.
        copy: The copy of its contents, or None.
        tensor: The tensor, from the step's beginning on.
        was_lazy: It was not initialized then.
        version: How often the tensor had been written to then.
        is_written: In place, by this step's forward.
    """

    def __init__(self, module: nn.Module, table: str, name: str) -> None:
        self.module = weakref.ref(module)
        self.slot = id(module), name
        self.table = table
        self.name = name
        self.copy: torch.Tensor | None = None
        self.tensor: torch.Tensor | None = None
        self.version: int | None = None
        self.is_written = False
        self._copied: weakref.ref[torch.Tensor] | None = None  # the copy's original
        self._home: weakref.ref[torch.Tensor] | None = None  # the last step's tensor
        self._changes = False  # a step was seen to change it
        # The tensor that was seen in its place last, whether a forward has put it
        # there, and whether other code has since the step began.
        self._placed: weakref.ref[torch.Tensor] | None = None
        self._is_of_forward = self._is_of_others = False
        self._is_replaced = False  # the step began with a tensor of a forward's
        self._memory: torch.Tensor | None = None  # the tensor's memory
        self.was_lazy = False

    def begin(self, tensor: torch.Tensor | None) -> None:
        """Notes which tensor is in its place now."""
        self.tensor = tensor
        self.note_placed(by_forward=False)
        self._is_replaced, self._is_of_others = self._is_of_forward, False
        self.was_lazy = tensor is not None and is_lazy(tensor)
        self.is_written = False
        self._memory = None if tensor is None else memory_of(tensor)
        if self._home is None and tensor is not None:
            self._home = weakref.ref(tensor)

    def note_placed(self, by_forward: bool) -> None:
        """Notes who has put the tensor there that is in its place now.

        Args:
            by_forward: A forward, if it is another one than was seen there last; else
                other code.
        """
        now, placed = self.current(), self._placed
        if (None if placed is None else placed()) is not now:
            self._placed = None if now is None else weakref.ref(now)
            self._is_of_forward = by_forward
            self._is_of_others = not by_forward and now is not self.tensor

    @property
    def is_plain(self) -> bool:
        """True for a tensor that can be read along with many others."""
        tensor = self.tensor
        if tensor is None or self.was_lazy or self._memory is None:
            return False
        return not (tensor.is_meta or tensor.is_inference())

    def needs_copy(self) -> bool:
        """Returns True if the contents have to be copied for this step."""
        tensor = self.tensor
        if tensor is None or self.was_lazy or tensor.is_meta:
            self.copy = self._copied = None
            return False
        version = _C.version_of(tensor)
        if not self.is_certain:
            is_known = self._copied is not None and self._copied() is tensor
            if is_known and version is not None and version == self.version:
                return False
            if self.table == PARAMETERS and num_bytes(tensor) > _MAX_FROZEN:
                self._remember(version)
                self.copy = None
                return False
        self._remember(version)
        return True

    def _remember(self, version: int | None) -> None:
        assert self.tensor is not None
        self._copied, self.version = weakref.ref(self.tensor), version

    def end_forward(self) -> None:
        """Notes whether a forward has written to the tensor."""
        if self.tensor is not None and not self.was_lazy:
            self.is_written |= _C.version_of(self.tensor) != self.version

    def end(self, compares: bool) -> None:
        """Notes whether a step has changed it, and lets go of the tensor.

        Args:
            compares: Compare the contents with the copy, which syncs.
        """
        before, now = self.tensor, self.current()
        if before is not None and now is before:
            self.note_change(compares)
        self.tensor = self._memory = None
        self._home = None if now is None else weakref.ref(now)

    def note_change(self, compares: bool) -> None:
        """Notes whether a step has changed the tensor in place."""
        tensor = self.tensor
        if tensor is None or self._changes or self.was_lazy or tensor.is_meta:
            return
        is_written = _C.version_of(tensor) != self.version
        self._changes = is_written or (compares and not self._is_same(tensor))

    def restore(self) -> str:
        """Restores it. Returns why that failed, or ""."""
        module, before = self.module(), self.tensor
        if module is None:
            return ""
        if self.was_lazy:
            return _reset(module)
        now = self.current()
        is_same = now is before
        if self._is_of_others and not (is_same or self._is_at_home(now)):
            is_changed = before is not None and not self._is_same(before)
            return "other code has replaced it since the forward" * is_changed
        was_moved = self.put_in_place()
        if before is None or before.is_meta:
            return ""
        if not was_moved and (self._is_replaced or not is_same) and not self.is_written:
            return ""  # other code owns its contents since: a batch, say
        return self._restore_contents(module, before)

    def _restore_contents(self, module: nn.Module, before: torch.Tensor) -> str:
        is_written = _C.version_of(before) != self.version
        if self.copy is None:
            return "it is large, and had not changed before" if is_written else ""
        if self._is_same(before):
            return ""
        if not is_written and not self.is_certain:
            return "it was written to without a version change, now or earlier"
        try:
            write(before, self.copy)
        except Exception:  # a layout that cannot be written to
            module.__dict__[self.table][self.name] = _like(before, self.copy.clone())
        self._remember(_C.version_of(before))
        return ""

    def put_in_place(self) -> bool:
        """Puts the tensor into the module, and its memory into the tensor.

        Returns:
            The tensor had other memory: its `.data` was exchanged.
        """
        module, now, before = self.module(), self.current(), self.tensor
        if now is not before and module is not None:
            is_plain = all(type(each) is nn.Parameter for each in (now, before))
            if not self._is_at_home(now) and (is_plain or self.table == BUFFERS):
                module.__dict__[self.table][self.name] = before
        if before is None or before.is_meta or self._memory is None:
            return False
        was_moved = not is_at(before, self._memory)
        if was_moved:
            before.data = self._memory
        return was_moved

    def _is_at_home(self, now: torch.Tensor | None) -> bool:
        """True for the last step's tensor: functional_call has removed another."""
        return now is not None and self._home is not None and self._home() is now

    def pair(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The tensor and what was in it; None if that is not known."""
        is_known = self.tensor is not None and self.copy is not None
        return (self.tensor, self.copy) if is_known else None  # type: ignore[return-value]

    @property
    def is_certain(self) -> bool:
        """True if the copy is of this step, False if it may be older."""
        return self._changes or (
            self.tensor is not None and num_bytes(self.tensor) <= SMALL
        )

    def restore_where(self, flag: torch.Tensor) -> None:
        """Restores the contents where a flag on the device is not 0."""
        now = self.current()
        if now is None or now is not self.tensor or self.copy is None:
            return
        if self._is_replaced or now.is_meta:
            return
        if self.is_certain or _C.version_of(now) != self.version:
            # The host reads a flag when it has come; its memory may be read-only.
            is_bad = flag.to(now.device, non_blocking=not now.is_cpu) != 0
            if not now.is_cpu:
                now.data.copy_(torch.where(is_bad, self.copy, now))
            elif is_bad:
                write(now, self.copy)

    def current(self) -> torch.Tensor | None:
        """The tensor that is in its place now."""
        module = self.module()
        table = {} if module is None else module.__dict__[self.table]
        found: torch.Tensor | None = table.get(self.name)
        return found

    def _is_same(self, tensor: torch.Tensor) -> bool:
        return self.copy is None or is_same_bits(self.copy, tensor)


def _like(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copy, requires_grad=False)
    return copy


def _reset(module: nn.Module) -> str:
    """Resets lazy statistics that the forward has initialized."""
    reset = getattr(module, "reset_running_stats", None)
    if reset is None:
        return "it was not initialized before this step"
    reset()
    return ""
