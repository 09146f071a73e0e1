"""The operations of a replay, and where their non-finite values came from.

Flow, for each operation that the trace shows (`OpTable.run`):

1. Who calls it, and the one whose derivative it computes (`_begin`).
2. What it reads: who wrote that, and the sources of what is bad of it (`_read`).
3. It runs. From now on it is the writer of what it made (`_note_written`).
4. What it made is scanned. If that is bad, it has the sources of what it read, or is
   one itself: then it is computed again for `details` (`_end`, `_note_bad`).

State, each by memory: the last writers, the sources of its bad values (`_bad`; none is
noted where it is finite), who returned it unwritten (`_empty`), what was scanned
(`kinds`). And of the last operations all that they have read (`_tape`).
"""

from __future__ import annotations

import collections
import functools
import itertools
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .. import _C
from ..base.tensors import are_plain, is_whole
from ..base.torch_ops import has
from ..guard.report.causes import UNDEFINED
from ..scanner.ops import scan
from ..torch_internals.compiled_calls import is_in_compiled_call
from ..torch_internals.compiler import has_compiled
from ..torch_internals.replaying import next_sequence
from .leaves import Leaf, LeafMap
from .mask_counts import MaskCounts
from .meant_infs import is_asked, is_meant, returns_meant
from .memory import Memories
from .op_call import OpCall, Source
from .op_trace import ModuleStack, OpObserver
from .root_op import details_of
from .tape import Tape
from .tensor_kinds import NAN, NEGATIVE_INF, Kinds, floats_in, is_float, kinds_of
from .torch_calls import TorchCall, running_call
from .users_lines import place_text

# Limits of time and memory. The failures of benchmarks/answers need no more than 6
# sources of a tensor, 6 writers of a memory, 2 undefined results and 3 operations that
# are computed again. With less, another origin is named, no lost value is found, or an
# operation has no details.
_MAX_SOURCES = 8
_MOST_WRITERS = 32
_MOST_UNDEFINED = 4
_MAX_DETAILS = 48
# Leaves that a report names.
_NAMED = ("parameter", "buffer", "batch", "attribute", "weight", "object")
_READS = "_local_scalar_dense"  # what `item()` and `float()` run
# The sources of a tensor, its kinds and its size.
_Read = list[tuple[list[Source], int, int]]


class OpTable(OpObserver):
    """Records the operations of a trace.

    Non-finite values are followed by the memory that holds them, so that views and
    writes in place are no matter. Nothing that runs is changed. Incurs a CPU-GPU sync
    for each operation on a device.

    Args:
        leaves: The tensors that are there before, by what they are.
        looks_back: Hold what operations read, for one that turns out undefined.

    Attributes:
        ops: The operations, in order.
        bad_modules: What modules were given or returned and was bad, with their names,
            in order.
        masked_modules: What wrote the -inf that are meant, of what modules were given
            or returned, by their names.
        kinds: Knows which kinds of non-finite values tensors hold.
        undefined: The first and the last operations whose results float64 cannot tell,
            or that overflow by their divisor, each with those that it depends on.
        is_compiled: True if an operation ran in a call of what was compiled.
        torch_calls: The torch calls that ran them, where these were recorded.
        carried: What the replay has read of bad values that the step itself may have
            left, as in an attribute of a module; known once it is closed.
    """

    def __init__(self, leaves: Sequence[Leaf], looks_back: bool = False) -> None:
        self.ops: list[OpCall] = []
        self.bad_modules: list[tuple[str, torch.Tensor]] = []
        self.masked_modules: dict[str, list[Source]] = {}
        self.is_compiled, self._may_be_compiled = False, has_compiled()
        self.number_of = Memories().number_of
        self.kinds = Kinds(self.number_of)
        self._mask_counts = MaskCounts(self.kinds)
        self._bad: dict[int, list[Source]] = {}
        self._empty: dict[int, OpCall] = {}
        self._writers: dict[int, tuple[OpCall, ...]] = {}
        self._given, self._leaves = leaves, LeafMap(leaves)
        self._last_items: collections.deque[tuple[OpCall, Any]]
        self._last_items = collections.deque(maxlen=_MOST_WRITERS)  # with their numbers
        self._num_details = 0
        self._by_sequence: dict[int, list[OpCall]] = {}
        self._last: dict[int, int] = {}  # of these numbers, by thread
        self._tape = Tape(self._writers) if looks_back else None
        self.undefined: dict[OpCall, list[OpCall]] = {}
        self.torch_calls: list[TorchCall] = []
        self.carried: list[str] = []

    def sources(self, tensor: torch.Tensor) -> list[Source]:
        """The sources of the non-finite values of a tensor."""
        number = self.number_of(tensor)
        known, empty = self._bad.get(number), self._empty.get(number)
        if known is not None:
            return known
        if empty is not None:
            return [empty]
        leaves = self._leaves.read_by(tensor, self._is_bad, _MAX_SOURCES)
        leaves = leaves or [Leaf("unknown", "", tensor)]
        for leaf in leaves:
            leaf.is_read = True
        return list(leaves)

    def usual_of(self, batch: Mapping[str, torch.Tensor]) -> list[Leaf]:
        """The bad tensors of the batch that were bad in the last clean step, too.

        Args:
            batch: The tensors of that step, by their names.
        """
        known = [leaf for leaf in self._given if leaf.is_read and leaf.name in batch]
        for leaf in known:
            assert leaf.tensor is not None
            now, then = kinds_of(leaf.tensor), kinds_of(batch[leaf.name])
            leaf.is_usual = leaf.kind == "batch" and not now & ~then
        return [leaf for leaf in known if leaf.is_usual]

    def _is_bad(self, leaf: Leaf) -> bool:
        return leaf.tensor is not None and self.kinds.of([leaf.tensor])[0][0] != 0

    @property
    def batch(self) -> list[Leaf]:
        """The tensors of the batch."""
        return [leaf for leaf in self._given if leaf.kind == "batch"]

    def leaf_of(self, tensor: torch.Tensor) -> Leaf | None:
        """The weight, buffer or input that a tensor is or views, or None."""
        leaf = self._leaves.around(tensor)
        if leaf is None or leaf.tensor is None or leaf.kind not in _NAMED:
            return None
        return leaf

    def _name_of(self, tensor: torch.Tensor) -> str:
        leaf = self.leaf_of(tensor)
        if leaf is None or leaf.tensor is None:
            return ""
        is_part = tensor.numel() < leaf.tensor.numel()
        return f"{'part of ' * is_part}`{leaf.name}`"

    def run(self, op: OpCall, modules: ModuleStack) -> Any:
        """Runs an operation, and records it; see `OpObserver`."""
        if op.waits:
            output = op.run()
            self.kinds.forget(op.returned)
            return output
        self._begin(op, modules)
        try:
            if op.is_view:
                op.run()
                if not op.fresh:
                    return op.output  # no value of it is new
            read = self._read(op)
            if not op.is_view:
                op.keep_written()
                op.run()
            self._note_written(op)
            if self._tape is not None:
                self._tape.end(op)
            self._end(op, read)
            return op.output
        finally:
            op.end()

    def _begin(self, op: OpCall, modules: ModuleStack) -> None:
        modules.note_caller(op)
        op.index, op.torch_call = len(self.ops), running_call()
        if op.node:
            op.derivative_of = self._differentiated(op)
        self.ops.append(op)
        sequence = next_sequence() - 1  # the number of this thread's last node
        if sequence > self._last.get(op.thread, -1):
            self._last[op.thread] = sequence
            self._by_sequence.setdefault(sequence, []).append(op)
        if self._may_be_compiled and not self.is_compiled:
            self.is_compiled = is_in_compiled_call()

    def _differentiated(self, op: OpCall) -> OpCall | None:
        """The operation whose derivative the autograd node computes that calls one.

        Autograd numbers its nodes as it makes them, just before their operation runs.
        What that writes to is cloned first, if it is needed, by a node of its own.
        """
        own = self._by_sequence.get(op.node_sequence, [])
        clones = self._by_sequence.get(op.node_sequence + 1, [])
        places = [each.index + 1 for each in clones if each.base == "clone"]
        found = own or [each for i in places for each in self.ops[i : i + 1]]
        if len(found) > 1 or not own:  # each thread counts for itself
            node = re.sub(r"Backward\d*$", "", op.node.rpartition("::")[2]).lower()
            names = ((each, each.base.replace("_", "").lower()) for each in found)
            found = [each for each, name in names if name.startswith(node)]
        return found[0] if len(found) == 1 else None

    def _read(self, op: OpCall) -> _Read:
        """Notes which operations wrote what one reads; returns what is bad of it."""
        read = op.read()
        numbers = [op.memory[id(tensor)] for tensor in read]
        ops = [each for n in numbers for each in self._writers.get(n, ())]
        ops += self._items_in(op) if op.is_constant else []
        op.read_from = tuple(dict.fromkeys(ops))
        op.unwritten = tuple(n for n in numbers if n not in self._writers)
        seen = self.kinds.of(read, op.memory)
        op.most_read = max((stat.abs_max or 0.0 for _, stat in seen), default=0.0)
        found = [
            (self.sources(tensor), kinds, tensor.numel())
            for tensor, (kinds, _) in zip(read, seen, strict=True)
            if kinds
        ]
        if self._tape is not None:
            self._tape.begin(op)
        return found

    def _items_in(self, op: OpCall) -> list[OpCall]:
        """The calls of `item()` whose numbers a tensor is made of, in order; or [].

        Those before it are known by their numbers. One alone, or zeros, may be others:
        these are of the same line.
        """
        tensor = op.arguments[0]
        if not 0 < tensor.numel() <= len(self._last_items):
            return []
        last = list(self._last_items)[-tensor.numel() :]
        ops, numbers = [each for each, _ in last], [number for _, number in last]
        with _C.Hidden():
            given = tensor.detach().flatten().tolist()
        is_known = len({*given}) > 1 or {place_text(e.sites) for e in ops} == {
            place_text(op.sites)
        }
        return ops * (is_known and given == numbers)

    def _note_written(self, op: OpCall) -> None:
        if op.base == _READS:
            self._last_items.append((op, op.output))
        for tensor in op.fresh:
            self._writers[op.memory[id(tensor)]] = (op,)
        for tensor in op.written:  # of many writers to the same memory the last ones
            number = op.memory[id(tensor)]
            is_over = op.overwrites(tensor) and is_whole(tensor)
            before = () if is_over else self._writers.get(number, ())
            self._writers[number] = (*before[1 - _MOST_WRITERS :], op)

    def last_bad(self) -> Iterator[OpCall]:
        """Yields the operations that made non-finite values, the last one first."""
        return (op for op in reversed(self.ops) if op.kinds)

    def close(self) -> None:
        """Notes which leaves were written to; lets go of what later operations need."""
        for leaf in self._given:
            if leaf.look is not None and leaf.tensor is not None and not leaf.is_kept:
                is_made = self.number_of(leaf.tensor) in self._writers
                leaf.is_written = is_made or leaf.look() is not leaf.tensor
        carried = [each for each in self._given if each.is_written and each.is_read]
        self.carried = [leaf.name for leaf in carried]
        if self._tape is not None:
            self._tape.clear()
            self._tape = None

    def forget_undefined(self, but: int = 0) -> None:
        """Lets go of what undefined results depend on, but for the first and the last.

        Args:
            but: How many are kept, one half of them the first.
        """
        while len(self.undefined) > but:
            of_middle = next(itertools.islice(self.undefined, but // 2, None))
            for each in self.undefined.pop(of_middle):
                each.let_go()

    def on_module(self, name: str, values: Any) -> None:
        """Notes what a module is given or has returned, if it is bad."""
        floats = floats_in(values)
        with _C.Hidden(), _C.OwnCode(are_plain(floats)):
            found = self.kinds.of(floats)
        for tensor, (kinds, _) in zip(floats, found, strict=True):
            # A mask's -inf is passed on; any other has an operation that made it.
            known = self._bad.get(self.number_of(tensor), ()) if kinds else ()
            made = (each for each in known if not is_meant(each, kinds))
            if kinds & ~NEGATIVE_INF or any(made):
                self.bad_modules.append((name, tensor))
            elif kinds:
                self.masked_modules.setdefault(name, []).extend(self.sources(tensor))

    def bad_within(self, module: str | None) -> list[torch.Tensor]:
        """The bad values of a module's calls, or of all modules', in order."""
        is_any = module is None
        return [t for name, t in self.bad_modules if is_any or name == module]

    def _end(self, op: OpCall, read: _Read) -> None:
        """Notes what an operation that has run has made of what it read."""
        self.kinds.forget(op.written)
        if op.is_communication:
            self._note_communication(op, read)
            return
        if op.is_empty:
            self._empty.update((op.memory[id(tensor)], op) for tensor in op.fresh)
            return
        self._mask_counts.note(op)
        made, bad = op.made, []
        seen = self.kinds.of(made, op.memory)
        op.abs_max = seen[0][1].abs_max if seen else None
        if op.is_leap:
            self._note_leap(op)
        for tensor, (kinds, _) in zip(made, seen, strict=True):
            number = op.memory[id(tensor)]
            if kinds:
                bad.append(tensor)
                op.kinds |= kinds
            elif (number in self._bad or number in self._empty) and is_whole(tensor):
                self._bad.pop(number, None)  # it is gone there
                self._empty.pop(number, None)
        if bad:
            with torch.no_grad():
                self._note_bad(op, bad, read)

    def _note_leap(self, op: OpCall) -> None:
        """Notes what else one was given that made large numbers of small ones."""
        by = op.args[-1] if has(op.base, "divides") else None
        stats = scan(each for each in op.arguments if not is_float(each))
        numbers = [each for each in op.args if isinstance(each, (int, float))]
        sizes = [*map(abs, numbers), *(stat.abs_max or 0.0 for stat in stats)]
        op.most_read = max([op.most_read, *sizes])
        if isinstance(by, torch.Tensor):
            op.divisor = self.kinds.of([by], op.memory)[0][1].abs_min
        elif isinstance(by, (int, float)):
            op.divisor = abs(by)

    def _note_communication(self, op: OpCall, read: _Read) -> None:
        """Notes that what arrives came from other ranks, or from here.

        It may not have arrived yet, and is not looked at before somebody reads it.
        """
        op.parents = [s for of, k, _ in read for s in of if not is_meant(s, k)]
        for tensor in [*op.arguments, *op.returned]:
            self.kinds.forget([tensor])
            self._empty.pop(op.memory[id(tensor)], None)
            self._bad.setdefault(op.memory[id(tensor)], [op])

    def _note_bad(self, op: OpCall, bad: Sequence[torch.Tensor], read: _Read) -> None:
        """Notes where bad results came from, or that they began here."""
        if has(op.base, "leaves_out_nan"):
            read = [e for e in read if e[1] != NAN or not all(map(is_asked, e[0]))]
        for of, kinds, _ in read:
            new = [each for each in of if each not in op.parents]
            op.parents += [each for each in new if not is_meant(each, kinds)]
        if not op.parents:
            given = functools.reduce(operator.or_, (k for _, k, _ in read), 0)
            op.is_meant = returns_meant(op, op.kinds, given)
            op.is_asked = bool(op.is_constant or op.numbers)
            op.masks = [each for of, _, _ in read for each in of]
            sizes = [size for _, _, size in read]
            op.reduces = bool(sizes) and max(t.numel() for t in bad) < min(sizes)
            if op.reduces or not op.is_meant:
                self._detail(op, bad)
                is_overflow = op.details is not None and op.details.is_overflow
                op.is_meant = bool(read) and not op.kinds & NAN and not is_overflow
        else:
            op.is_asked = all(map(is_asked, op.parents))
        for tensor in bad:
            known = self._bad.setdefault(op.memory[id(tensor)], [op])
            if len(known) < _MAX_SOURCES and known[-1] is not op:
                known.append(op)

    def _detail(self, op: OpCall, bad: Sequence[torch.Tensor]) -> None:
        if self._num_details < _MAX_DETAILS:
            self._num_details += 1
            given = self._mask_counts, self._name_of
            op.details = details = details_of(op, bad, *given)
            is_open = details.cause == UNDEFINED.name
            is_open &= details.op.true_value is not None
            is_asked = is_open or details.divisor is not None
            if is_asked and self._tape is not None:
                self.undefined[op] = before = self._tape.before(op)
                for each in before:
                    each.num_holders += 1
                self.forget_undefined(but=_MOST_UNDEFINED)
