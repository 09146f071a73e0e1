"""The operations of a replay, and the non-finite values that they made or passed on."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from ..core.tensors import is_whole
from ..torch_internals.compiler import is_in_compiled_call
from ..torch_internals.running import (
    TorchDispatchMode,
    autograd_node,
    next_sequence,
    no_dispatch,
    sequence_of,
)
from ..torch_internals.tensor_internals import storages
from ..tree import tensors_in
from .places import Frames, ModuleCall, ModuleStack, runs_in_hook, users_frames
from .root_op import Details, OpCall, Sums, details_of
from .tensor_kinds import (
    NAN,
    NEGATIVE_INF,
    Kinds,
    StorageMap,
    floats_in,
    is_float,
    kinds_of,
)

# The one dispatch mode: it shows each operation to an observer.


@runtime_checkable
class OpObserver(Protocol):
    """Sees the operations of a trace, and what modules return."""

    def run(self, op: OpCall, modules: ModuleStack) -> Any:
        """Runs an operation with `op.run()`, and returns what that returned.

        Args:
            op: The operation, which is about to run.
            modules: Knows which module runs.
        """

    def on_module(self, name: str, output: Any) -> None:
        """Takes in what a module has returned.

        Args:
            name: The module's name.
            output: What it returned.
        """


_WRAPPERS = ("DTensor", "AsyncCollectiveTensor")  # of tensors that ranks share


class OpTrace(TorchDispatchMode):
    """Shows all operations to an observer while it is entered.

    Of tensors that ranks share, the operations on this rank's parts.

    Args:
        models: The models, by what their modules' names begin with; modules of others
            are not known.
        observer: Sees the operations.
    """

    def __init__(self, models: Mapping[str, nn.Module], observer: OpObserver) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observer = observer
        self._modules = ModuleStack(models, observer.on_module)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # that would import dynamo, which takes seconds

    def __enter__(self) -> OpTrace:
        self._modules.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._modules.__exit__(*exception)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(each.__name__ in _WRAPPERS for each in types):
            return NotImplemented  # it comes again, with this rank's parts
        if str(func).startswith("profiler."):
            return func(*args, **kwargs)
        return self._observer.run(OpCall(func, args, kwargs), self._modules)


# The parts of a table of operations: operations, and tensors from before.


_CONSTANTS = ("buffer", "attribute", "weight")  # of models and other modules


class Leaf:
    """A tensor that no operation of the replay made, such as a weight.

    Attributes:
        kind: "parameter", "buffer", "batch", "gradient" or "unknown"; or see
            `HeldTensor`.
        name: Its name, or key.
        tensor: The tensor.
        is_read: Whether an operation has read non-finite values of it.
        is_written: Whether the replay has written to it; known of `HeldTensor` alone.
    """

    def __init__(self, kind: str, name: str, tensor: torch.Tensor | None) -> None:
        self.kind = kind
        self.name = name
        self.tensor = tensor
        self.is_read = self.is_written = False

    @functools.cached_property
    def is_mask(self) -> bool:
        """True if it holds -inf alone; in a batch, with zeros alone."""
        values = self.tensor
        if values is None or kinds_of(values) != NEGATIVE_INF:
            return False
        is_sparse = not bool((values[values.isfinite()] != 0).any())
        is_data = self.kind in ("batch", "object")
        return is_sparse if is_data else self.kind in _CONSTANTS


class Row:
    """One operation.

    Attributes:
        index: Its place in the order of execution.
        name: Its name, such as "aten.div.Tensor".
        module: The name of the module that called it; None in backward.
        frames: The user's lines that led to it.
        thread: The thread that ran it.
        node: The name of the autograd node that called it, or "".
        node_sequence: The number of that node.
        sequence: The number of the last node that was made in this thread.
        custom: Whether the user's code called it within a backward.
        in_hook: Whether that was a hook on a gradient.
        variable: Where gradients are added up: whose.
        read_from: The operations that wrote what it has read.
        parents: What its non-finite inputs came from that are not meant.
        kinds: The kinds of non-finite values that it returned.
        abs_max: The largest magnitude of its first result; None if it has none.
        is_meant: Whether these are infs that the code asked for, as of a mask.
        masks: The sources of the infs that it was given, where all of them are meant.
        reduces: Whether its infs are fewer than those: a mask has gone beyond itself.
        is_empty: Whether it returned memory that nobody has written to.
        is_communication: Whether other ranks may have made what it returned.
        details: What is known of its inputs and outputs, where it made the bad value.
        call: Its arguments, where it made the bad value and they are wanted; else None.
        module_call: The call of the module that called it, likewise.
    """

    __slots__ = (
        *("index", "name", "module", "frames", "node", "node_sequence", "sequence"),
        *("parents", "kinds", "is_meant", "is_empty", "details", "custom", "thread"),
        *("variable", "call", "module_call", "is_communication"),
        *("in_hook", "masks", "reduces", "read_from", "abs_max"),
    )

    def __init__(
        self, index: int, name: str, module: str | None, frames: Frames
    ) -> None:
        self.index = index
        self.name = name
        self.module = module
        self.frames = frames
        self.thread = threading.get_ident()
        self.node = ""
        self.node_sequence = self.sequence = -1
        self.read_from: tuple[Row, ...] = ()
        self.abs_max: float | None = None
        self.parents: list[Source] = []
        self.masks: list[Source] = []
        self.kinds = 0
        self.is_meant = self.is_empty = self.custom = self.is_communication = False
        self.in_hook = self.reduces = False
        self.details: Details | None = None
        self.variable: torch.Tensor | None = None
        self.call: OpCall | None = None
        self.module_call: ModuleCall | None = None

    @property
    def in_backward(self) -> bool:
        """True if an autograd node called it, not a checkpointed forward."""
        return bool(self.node) and self.module is None


Source = Row | Leaf


def is_meant(source: Source, kinds: int) -> bool:
    """True if the infs of a source were asked for, as those of a mask are.

    Args:
        source: The source.
        kinds: The kinds of non-finite values that were read of it.
    """
    if isinstance(source, Row):
        return source.is_meant
    if source.kind == "unknown":  # such as a constant
        return kinds == NEGATIVE_INF
    return source.is_mask


_EMPTY = {
    *("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"),
    *("empty_permuted", "empty_quantized", "resize_"),
}
_MAX_SOURCES = 8
_MOST_WRITERS = 32
_MAX_DETAILS = 48
_autograd: Any = torch.autograd
# The sources of a tensor, its kinds and its size.
_Read = list[tuple[list[Source], int, int]]


class OpTable:
    """Records a row for each operation of a trace.

    Non-finite values are followed by the memory that holds them, so that views and
    writes in place are no matter. Nothing that runs is changed. Incurs a CPU-GPU sync
    for each operation on a device.

    Args:
        leaves: The tensors that are there before, by what they are.
        keeps_calls: Keep the arguments of operations that made bad values.

    Attributes:
        rows: The operations, in order.
        bad_modules: The modules' outputs that were bad, with their names, in order.
        kinds: Knows which kinds of non-finite values tensors hold.
        is_compiled: True if an operation ran in a call of what was compiled.
    """

    def __init__(self, leaves: Sequence[Leaf], keeps_calls: bool = False) -> None:
        self._keeps_calls = keeps_calls
        self.rows: list[Row] = []
        self.bad_modules: list[tuple[str, torch.Tensor]] = []
        self.is_compiled = False
        self.kinds = Kinds()
        self._sums = Sums(self.kinds)
        self._bad: StorageMap[list[Source]] = StorageMap()
        self._empty: StorageMap[Row] = StorageMap()
        self._writers: StorageMap[tuple[Row, ...]] = StorageMap()
        self._leaves: dict[int, Leaf] = {}
        self._num_details = 0
        for leaf in leaves:
            for key in storages(leaf.tensor):
                self._leaves.setdefault(key, leaf)

    def sources(self, tensor: torch.Tensor) -> list[Source]:
        """The sources of the non-finite values of a tensor."""
        known, empty = self._bad.get(tensor), self._empty.get(tensor)
        if known is not None:
            return known
        if empty is not None:
            return [empty]
        leaves = [self._leaves.get(key) for key in storages(tensor)]
        found = [each for each in leaves if each] or [Leaf("unknown", "", tensor)]
        for leaf in found:
            leaf.is_read = True
        return list(found)

    def run(self, op: OpCall, modules: ModuleStack) -> Any:
        """Runs an operation, and records its row; see `OpObserver`."""
        if op.waits:
            output = op.run()
            self.kinds.forget(tensors_in(output))
            return output
        row = self._begin(op, modules)
        read = op.read()
        kinds = self.kinds.of(read)
        bad = [
            (self.sources(tensor), each, tensor.numel())
            for tensor, each in zip(read, kinds, strict=True)
            if each
        ]
        op.keep_written()
        self._note_read(row, read)
        output = op.run()
        with torch.no_grad():
            fresh = op.fresh(output)
            self._note_written(op, row, fresh)
            self._end(op, row, output, fresh, bad)
        if row.call is not None and not row.in_backward:
            row.module_call = modules.call()
        return output

    def _note_read(self, row: Row, read: Sequence[torch.Tensor]) -> None:
        """Notes which operations wrote what one reads."""
        rows = [each for t in read for each in self._writers.get(t) or ()]
        row.read_from = tuple(dict.fromkeys(rows))

    def _note_written(
        self, op: OpCall, row: Row, fresh: Sequence[torch.Tensor]
    ) -> None:
        for tensor in fresh:
            self._writers.put(tensor, (row,))
        for tensor in op.written:  # of many writers to the same memory the last ones
            before = self._writers.get(tensor) or ()
            self._writers.put(tensor, (*before[1 - _MOST_WRITERS :], row))

    def on_module(self, name: str, output: Any) -> None:
        """Notes what a module has returned, if it is bad."""
        floats = floats_in(output)
        with no_dispatch():
            found = self.kinds.of(floats)
        for tensor, kinds in zip(floats, found, strict=True):
            # A mask's -inf is handed on; any other has an operation that made it.
            made = (s for s in self._bad.get(tensor) or () if not is_meant(s, kinds))
            if kinds & ~NEGATIVE_INF or (kinds and any(made)):
                self.bad_modules.append((name, tensor))

    def _begin(self, op: OpCall, modules: ModuleStack) -> Row:
        node: Any = autograd_node()
        frames = users_frames()
        row = Row(len(self.rows), op.name, modules.current(node is not None), frames)
        row.sequence = next_sequence() - 1
        if node is not None:
            row.node = str(node.name())
            row.node_sequence = sequence_of(node)
            row.variable = getattr(node, "variable", None)
            row.custom = bool(frames)
            row.in_hook = row.custom and runs_in_hook()
        self.rows.append(row)
        self.is_compiled = self.is_compiled or is_in_compiled_call()
        return row

    def _end(
        self,
        op: OpCall,
        row: Row,
        output: Any,
        fresh: Sequence[torch.Tensor],
        read: _Read,
    ) -> None:
        self.kinds.forget(op.written)
        if op.is_communication:
            self._note_communication(op, row, output, read)
            return
        if op.base in _EMPTY:
            row.is_empty = True
            for tensor in fresh:
                self._empty.put(tensor, row)
            return
        self._sums.note(op, fresh)
        results = [t for t in [*fresh, *op.written] if is_float(t) and t.numel()]
        bad, found = [], self.kinds.of(results)
        row.abs_max = self.kinds.stat(results[0]).abs_max if results else None
        for tensor, kinds in zip(results, found, strict=True):
            if kinds:
                bad.append(tensor)
                row.kinds |= kinds
            elif is_whole(tensor):  # what was bad there is gone
                self._bad.drop(tensor)
                self._empty.drop(tensor)
        if bad:
            self._note_bad(op, row, bad, output, read)

    def _note_communication(
        self, op: OpCall, row: Row, output: Any, read: _Read
    ) -> None:
        """Notes that what arrives came from other ranks, or from here.

        It may not have arrived yet, and is not looked at before somebody reads it.
        """
        row.is_communication = True
        row.parents = [s for of, k, _ in read for s in of if not is_meant(s, k)]
        for tensor in tensors_in((op.args, op.kwargs, output)):
            self.kinds.forget([tensor])
            self._empty.drop(tensor)
            if self._bad.get(tensor) is None:
                self._bad.put(tensor, [row])

    def _note_bad(
        self,
        op: OpCall,
        row: Row,
        bad: Sequence[torch.Tensor],
        output: Any,
        read: _Read,
    ) -> None:
        """Notes where bad results came from, or that they began here."""
        for of, kinds, _ in read:
            new = [each for each in of if each not in row.parents]
            row.parents += [each for each in new if not is_meant(each, kinds)]
        if not row.parents:
            row.is_meant = _is_meant(op, row, read)
            row.masks = [each for of, _, _ in read for each in of]
            sizes = [size for _, _, size in read]
            row.reduces = bool(sizes) and max(t.numel() for t in bad) < min(sizes)
            if row.reduces or not row.is_meant:
                self._detail(op, row, bad, output, bool(read))
        for tensor in bad:
            known = self._bad.get(tensor)
            if known is None:
                self._bad.put(tensor, [row])
            elif len(known) < _MAX_SOURCES and known[-1] is not row:
                known.append(row)

    def _detail(
        self,
        op: OpCall,
        row: Row,
        bad: Sequence[torch.Tensor],
        output: Any,
        has_masks: bool,
    ) -> None:
        if self._num_details < _MAX_DETAILS:
            self._num_details += 1
            row.details = details_of(op, bad, output, self._sums)
            if self._keeps_calls:
                row.call = op
                op.note_versions()
        # A mask's infs may change their sign; what overflows beside them is news.
        is_overflow = row.details is not None and row.details.is_overflow
        row.is_meant = has_masks and not row.kinds & NAN and not is_overflow


def _is_meant(op: OpCall, row: Row, read: _Read) -> bool:
    """True if an operation's infs were asked for: by a constant, or handed on.

    A mask is made of -inf. Of another constant that was used it is told.
    """
    if row.kinds & NAN:
        return False
    if not read:
        numbers = op.is_constant or op.numbers
        return bool(numbers) and row.kinds == NEGATIVE_INF
    given = 0
    for _, kinds, _ in read:
        given |= kinds
    return not row.kinds & ~given
