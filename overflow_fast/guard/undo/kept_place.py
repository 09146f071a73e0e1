"""One place of a module that holds a tensor, as it was when a step began.

The place of a buffer, of a frozen parameter, or of a trained weight. Frozen parameters
are kept with the buffers since they may hold statistics, which a forward updates by
`.data`.

1. Buffers: a small one, and one that a step was seen to change, is copied in each step:
   its copy is certain. A large one is copied once. A write that torch does not count
   may have come behind that copy: such a tensor is not restored, which the report says.
2. Weights: an optimizer writes to them between steps; a forward hardly ever does, but
   for an embedding with `max_norm`, or an initialization by the first batch. One that a
   forward was seen to write to is copied in each step; a small one in a full step, too,
   and in each step if its module's code may write to it.
3. A step that is undone may find another tensor in the place. If a forward has put it
   there, the one of the beginning comes back. If other code has, it stays. If it is the
   one of the last step, it stays, too: `functional_call` had another one there for the
   forward.
4. The contents of a buffer are written back where they differ, those of a weight where
   a forward has written to it. A tensor that an earlier forward has put into the place,
   such as a part of its batch, belongs to other code, unless this step's forward has
   written to it.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ... import _C
from ...torch_internals.module_internals import BUFFERS
from .tensors import SMALL, is_at, is_same_bits, memory_of, num_bytes, write

Slot = tuple[int, str, str]  # a module's id, its table, the name there

# Bytes. Larger frozen parameters are not copied before a change has been seen: most are
# the weights of a model that adapters train, which a copy would hold twice. The first
# step that changes such a one cannot be undone, which the report says.
_MAX_FROZEN = 2**20


class KeptPlace:
    """One place of a module that holds a tensor; see this file's docstring.

    Args:
        module: The module. It is held weakly.
        table: The attribute of the module that holds it: its buffers or parameters.
        name: Its name there.
        is_trained: It holds a trained weight.

    Attributes:
        slot: Identifies the place.
        tensor: The tensor, from the step's beginning on.
        copy: The copy of its contents, or None.
        was_lazy: It was not initialized when the step began.
        version: How often the tensor had been written to then.
        changes: A step was seen to change the buffer, or a forward the weight.
        is_written: In place, by this step's forward.
    """

    def __init__(
        self, module: nn.Module, table: str, name: str, is_trained: bool
    ) -> None:
        self.module = weakref.ref(module)
        self.slot: Slot = id(module), table, name
        self.table, self.name, self.is_trained = table, name, is_trained
        self.tensor: torch.Tensor | None = None
        self.copy: torch.Tensor | None = None
        self.was_lazy = self.changes = self.is_written = False
        self.version: int | None = None
        # No weak references: torch swaps no tensor that has one, as `model.to()` may.
        self._copied: torch.Tensor | None = None  # the copy's original
        self._home: torch.Tensor | None = None  # the last step's tensor
        # The tensor that was seen in its place last, whether a forward has put it
        # there, and whether other code has since the step began.
        self._placed: torch.Tensor | None = None
        self._is_of_forward = self._is_of_others = False
        self._is_replaced = False  # the step began with a tensor of a forward's
        self._memory: torch.Tensor | None = None  # a buffer's memory

    @property
    def kind(self) -> str:
        """The kind of tensor in it, in words."""
        if self.table == BUFFERS:
            return "buffer"
        return "weight" if self.is_trained else "frozen parameter"

    def current(self) -> torch.Tensor | None:
        """The tensor that is in its place now."""
        module = self.module()
        table = {} if module is None else module.__dict__[self.table]
        found: torch.Tensor | None = table.get(self.name)
        return found

    # The course of a step.

    def begin(self, is_full: bool) -> bool:
        """Notes which tensor is in its place now; True if it has to be copied.

        Args:
            is_full: Copy a small weight, too.
        """
        self.tensor = tensor = self.current()
        self.note_placed(by_forward=False)
        self._is_replaced, self._is_of_others = self._is_of_forward, False
        self.is_written = False
        self.was_lazy = tensor is not None and is_lazy(tensor)
        self._memory = None
        if tensor is None or self.was_lazy or tensor.is_meta:
            self.copy = self._copied = None
            return False
        if not self.is_trained:  # an engine may move weights
            self._memory = memory_of(tensor)
        if self._home is None:
            self._home = tensor
        version = _C.version_of(tensor)
        is_known = self._copied is tensor and version is not None
        if is_known and version == self.version and not self.is_certain:
            return False  # there is a copy
        self._copied, self.version = None, version
        if self.is_trained:
            is_copied = self.changes or (is_full and 0 < num_bytes(tensor) <= SMALL)
        else:
            is_large = num_bytes(tensor) > _MAX_FROZEN
            is_copied = self.is_certain or self.table == BUFFERS or not is_large
        if is_copied:
            self._copied = tensor
        else:
            self.copy = None
        return is_copied

    def note_placed(self, by_forward: bool) -> None:
        """Notes who has put the tensor there that is in its place now.

        Args:
            by_forward: A forward, if it is another one than was seen there last; else
                other code.
        """
        now = self.current()
        if self._placed is not now:
            self._placed = now
            self._is_of_forward = by_forward
            self._is_of_others = not by_forward and now is not self.tensor

    def end(self) -> None:
        """Lets go of the tensor at the end of a step that has put another one there."""
        self._home = self.current()
        self.tensor = self._memory = None

    # What is known of it.

    @property
    def is_plain(self) -> bool:
        """True for a tensor that can be read along with many others."""
        is_plain = self._memory is not None or self.is_trained
        return is_plain and self.tensor is not None and not self.tensor.is_inference()

    @property
    def is_certain(self) -> bool:
        """True if the copy is of this step, False if it may be older."""
        if self.is_trained or self.changes:
            return True
        return self.tensor is not None and num_bytes(self.tensor) <= SMALL

    def is_same(self) -> bool:
        """True if its tensor holds what it held. Incurs a CPU-GPU sync."""
        tensor = self.tensor
        return tensor is None or self.copy is None or is_same_bits(self.copy, tensor)

    def pair(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The tensor and what was in it; None if that is not known."""
        is_known = self.tensor is not None and self.copy is not None
        return (self.tensor, self.copy) if is_known else None  # type: ignore[return-value]

    # A step that is undone.

    def restore(self) -> str:
        """Restores it. Returns why that failed, or ""."""
        module, before, now = self.module(), self.tensor, self.current()
        if module is None:
            return ""
        if self.was_lazy:
            return _reset(module)
        is_others = self.is_trained and not self.is_written
        if self._is_of_others and not (now is before or self._is_at_home(now)):
            return "" if is_others or self.is_same() else _REPLACED
        was_moved = self.put_in_place()
        if before is None or before.is_meta:
            return ""
        is_foreign = self._is_replaced or now is not before  # a batch, say
        if is_others or (is_foreign and not (was_moved or self.is_written)):
            return ""  # its contents are other code's
        is_written = _C.version_of(before) != self.version
        if self.copy is None and self.is_trained:
            return "the forward wrote to it, and what it held before is not known"
        if self.copy is None:
            return "it is large, and had not changed before" if is_written else ""
        if not (is_written or self.is_certain or self.is_same()):
            return "it was written to without a version change, now or earlier"
        write(before, self.copy)
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
        if before is None or self._memory is None:
            return False
        was_moved = not is_at(before, self._memory)
        if was_moved:
            before.data = self._memory
        return was_moved

    def restore_where(self, flag: torch.Tensor) -> None:
        """Restores the contents of a buffer where a flag on the device is not 0."""
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

    def _is_at_home(self, now: torch.Tensor | None) -> bool:
        """True for the last step's tensor: functional_call has removed another."""
        return now is not None and self._home is now


_REPLACED = "other code has replaced it since the forward"


def _reset(module: nn.Module) -> str:
    """Resets lazy statistics that the forward has initialized."""
    reset = getattr(module, "reset_running_stats", None)
    if reset is None:
        return "it was not initialized before this step"
    reset()
    return ""
