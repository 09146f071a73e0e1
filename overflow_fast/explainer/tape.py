"""The last operations of a trace, with what they read and wrote, by reference."""

from __future__ import annotations

import collections
import heapq
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..base.tensors import PLAIN
from ..base.tree import tensors_in
from .op_rows import Row
from .op_trace import OpCall
from .storage_map import StorageMap, memory_of
from .tensor_kinds import is_float

# In benchmarks/answers a result that is asked about depends on at most 20 operations,
# of at most 35 that ran before it. Larger models put more between.
_MOST_CALLS = 1024
_MOST_BEFORE = 96  # of one that is asked about
_MOST_NUMEL = 2**25  # of all results that they hold, and of all that is copied


class Contents:
    """The contents of some memory between two writes to it.

    Attributes:
        memory: A number for the memory.
        numel: How many elements it has.
        storage: The memory itself, or a copy once somebody is about to write to it;
            None if that was too large.
        num_holders: How many tensors are held that have it.
        is_made: Whether an operation of the trace has written it, not the program
            before.
    """

    __slots__ = ("_nbytes", "is_made", "memory", "num_holders", "numel", "storage")

    def __init__(
        self, memory: int, storage: torch.UntypedStorage, itemsize: int, is_made: bool
    ) -> None:
        self.memory, self._nbytes = memory, storage.nbytes()
        self.is_made = is_made
        self.numel = self._nbytes // itemsize
        self.storage: torch.UntypedStorage | None = storage
        self.num_holders = 0

    @property
    def is_held(self) -> bool:
        """True if it can still be read; a wrapper may free a weight's memory."""
        return self.storage is not None and self.storage.nbytes() == self._nbytes


class TapedTensor(NamedTuple):
    """A tensor as an operation has read or written it.

    Attributes:
        contents: What its memory held.
        dtype: Its dtype.
        device: Its device.
        size: Its size.
        stride: Its strides.
        offset: Where it begins in its memory.
    """

    contents: Contents
    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @property
    def memory(self) -> int:
        """A number for its memory."""
        return self.contents.memory

    @property
    def is_float(self) -> bool:
        """True if it holds numbers with a fraction."""
        return self.dtype.is_floating_point

    @property
    def whole(self) -> torch.Tensor:
        """All of its memory, as one row of elements."""
        flat = torch.empty(0, dtype=self.dtype, device=self.device)
        assert self.contents.storage is not None
        return flat.set_(self.contents.storage)

    @property
    def value(self) -> torch.Tensor:
        """Its values as they were."""
        return self.of(self.whole)

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor in other memory of the same layout."""
        return memory.as_strided(self.size, self.stride, self.offset)


@dataclass(slots=True)
class TapedCall:
    """An operation with what it read, and what it returned and wrote to.

    Attributes:
        func: The operation.
        base: See `OpCall`.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        row: Its row.
        read: The tensors that it was given, by their `id`.
        results: The float tensors that it returned, and those that it wrote to.
    """

    func: Any
    base: str
    args: Any
    kwargs: Any
    row: Row
    read: dict[int, TapedTensor] = field(default_factory=dict)
    results: list[TapedTensor] = field(default_factory=list)

    @property
    def tensors(self) -> list[TapedTensor]:
        """All that it has read or written."""
        return [*self.read.values(), *self.results]

    @property
    def is_held(self) -> bool:
        """True if all that it has read or written can be read still."""
        return all(each.contents.is_held for each in self.tensors)


class Tape:
    """Holds what the last operations have read and written.

    By reference: memory is copied where an operation is about to write to it.

    Args:
        writers: The operations that have written to memory.
    """

    def __init__(self, writers: StorageMap[tuple[Row, ...]]) -> None:
        self._writers = writers
        self._calls: collections.deque[TapedCall] = collections.deque()
        self._now: dict[int, Contents] = {}  # of each memory
        self._numel = self._num_copied = 0

    def begin(self, op: OpCall, row: Row) -> TapedCall | None:
        """Takes in what an operation is about to read; None if it cannot be held."""
        call = TapedCall(op.func, op.base, op.args, op.kwargs, row)
        is_known = not (op.is_empty or op.is_communication)
        for tensor in op.arguments if is_known else ():
            taped = self._taped(tensor)
            if taped is None:
                is_known = False
                break
            call.read[id(tensor)] = taped
        for tensor in op.written:
            self._copy(tensor)
        if not is_known:
            self._drop(call)
        return call if is_known else None

    def end(self, op: OpCall, call: TapedCall | None, output: Any) -> None:
        """Takes in what it has returned and written to."""
        if call is None:
            return
        returned = [output] if type(output) is torch.Tensor else tensors_in(output)
        for tensor in [*returned, *op.written]:
            taped = self._taped(tensor) if is_float(tensor) else None
            if taped is not None:
                call.results.append(taped)
            elif is_float(tensor):
                self._drop(call)
                return
        self._calls.append(call)
        while len(self._calls) > _MOST_CALLS or self._numel > _MOST_NUMEL:
            self._drop(self._calls.popleft())

    def before(self, row: Row) -> list[TapedCall]:
        """The operations that a row depends on, and its own, in order.

        Those that are held and ran last; what they read of others is taken as it was.
        """
        held = {call.row.index: call for call in self._calls}
        found: list[TapedCall] = []
        waiting = [-row.index]
        while waiting and len(found) < _MOST_BEFORE:
            call = held.pop(-heapq.heappop(waiting), None)
            if call is not None:
                found.append(call)
                for each in call.row.read_from:
                    heapq.heappush(waiting, -each.index)
        return found[::-1]

    def _taped(self, tensor: torch.Tensor) -> TapedTensor | None:
        is_plain = type(tensor) in PLAIN and tensor.layout is torch.strided
        if not is_plain or tensor.is_complex():
            return None
        for memory, storage in memory_of(tensor).items():
            contents = self._now.get(memory)
            if contents is None:
                is_made = self._writers.get(tensor) is not None
                contents = Contents(memory, storage, tensor.itemsize, is_made)
                self._now[memory] = contents
                self._numel += contents.numel * is_made
            contents.num_holders += 1
            layout = tensor.shape, tensor.stride(), int(tensor.storage_offset())
            return TapedTensor(contents, tensor.dtype, tensor.device, *layout)
        return None

    def _drop(self, call: TapedCall) -> None:
        """Lets go of what an operation alone has held."""
        for each in call.tensors:
            contents = each.contents
            contents.num_holders -= 1
            if not contents.num_holders:
                self._numel -= contents.numel * contents.is_made
                if self._now.get(contents.memory) is contents:
                    del self._now[contents.memory]

    def _copy(self, tensor: torch.Tensor) -> None:
        """Copies the memory of a tensor that is about to be written to."""
        for memory in memory_of(tensor):
            contents = self._now.pop(memory, None)
            if contents is None or contents.storage is None:
                continue
            self._num_copied += contents.numel
            is_small = self._num_copied <= _MOST_NUMEL
            copy = contents.storage.clone() if is_small else None  # type: ignore[no-untyped-call]
            contents.storage = copy
