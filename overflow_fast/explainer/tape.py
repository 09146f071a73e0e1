"""The last operations of a trace, with what they read and wrote, by reference."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Mapping

import torch

from ..base.tensors import PLAIN
from .memory import Contents, TapedTensor
from .op_call import OpCall
from .tensor_kinds import is_float
from .trace_back import readers_before

# In benchmarks/answers a result that is asked about depends on at most 20 operations,
# of at most 35 that ran before it. A loop in the program puts more between: a cell of
# 10 operations over 200 times has 2000, and backward as many twice. With less, the
# operation that lost a value is not found; more takes as much memory and time.
_MOST_CALLS = 8192
_MOST_NUMEL = 2**25  # of all results that they hold, and of all that is copied


class Tape:
    """Holds what the last operations have read and written.

    By reference: memory is copied where an operation is about to write to it.

    Args:
        writers: The operations that have written to memory.
    """

    def __init__(self, writers: Mapping[int, tuple[OpCall, ...]]) -> None:
        self._writers = writers
        self._ops: collections.deque[OpCall] = collections.deque()
        # Of each memory, as long as an operation has read or written it so.
        self._now: dict[int, weakref.ref[Contents]] = {}
        self._numel = self._num_copied = 0

    def begin(self, op: OpCall) -> None:
        """Takes in what an operation reads, and copies what it is about to write to."""
        is_known = not (op.is_empty or op.is_communication)
        if is_known and all(_can_be_held(each, op) for each in op.arguments):
            op.given = {id(each): self._taped(each, op) for each in op.arguments}
            op.is_taped = True
        for tensor in op.written:
            self._copy(op.memory[id(tensor)])

    def end(self, op: OpCall) -> None:
        """Takes in what it has returned and written to."""
        if not op.is_taped:
            return
        made = [t for t in [*op.returned, *op.written] if is_float(t)]
        can_be_held = all(_can_be_held(each, op) for each in made)
        op.results = [self._taped(tensor, op) for tensor in made if can_be_held]
        op.num_holders += 1
        if not can_be_held:
            self._drop(op)
            return
        self._ops.append(op)
        while len(self._ops) > _MOST_CALLS or self._numel > _MOST_NUMEL:
            self._drop(self._ops.popleft())

    def clear(self) -> None:
        """Lets go of all operations."""
        while self._ops:
            self._drop(self._ops.popleft())

    def before(self, op: OpCall) -> list[OpCall]:
        """The operations that one depends on, and itself, in order.

        Those that are held and ran last; what they read of others is taken as it was.
        """
        held = {*self._ops}
        found = readers_before(
            [op] if op in held else [],
            lambda each: [e for e in each.read_from if e in held],
        )
        return sorted(held & found.keys(), key=lambda each: each.index)

    def _taped(self, tensor: torch.Tensor, op: OpCall) -> TapedTensor:
        memory = op.memory[id(tensor)]
        contents = known() if (known := self._now.get(memory)) else None
        if contents is None:
            storage = tensor.untyped_storage()
            nbytes, is_made = storage.nbytes(), memory in self._writers
            size = nbytes, nbytes // tensor.itemsize
            contents = Contents(memory, storage, *size, is_made)
            self._now[memory] = weakref.ref(contents)
        if not contents.num_holders:
            self._numel += contents.numel * contents.is_made
        contents.num_holders += 1
        layout = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return TapedTensor(contents, tensor.dtype, tensor.device, *layout)

    def _drop(self, op: OpCall) -> None:
        """Lets go of what an operation alone has held."""
        for each in op.taped:
            each.contents.num_holders -= 1
            if not each.contents.num_holders:
                self._numel -= each.contents.numel * each.contents.is_made
        op.let_go()

    def _copy(self, memory: int) -> None:
        """Copies memory that is about to be written to."""
        contents = known() if (known := self._now.pop(memory, None)) else None
        if contents is None or contents.storage is None:
            return
        self._num_copied += contents.numel
        is_small = self._num_copied <= _MOST_NUMEL
        copy = contents.storage.clone() if is_small else None  # type: ignore[no-untyped-call]
        contents.storage = copy


def _can_be_held(tensor: torch.Tensor, op: OpCall) -> bool:
    """True if its values follow from its memory and its layout alone."""
    is_plain = type(tensor) in PLAIN and tensor.layout is torch.strided
    if not is_plain or tensor.is_complex() or tensor.is_neg():
        return False
    return op.memory[id(tensor)] > 0
