"""One call of an operation: what it was given, what it made, and who called it.

1. `OpTrace` makes an `OpCall` of what is about to run: what it is given, and what it
   writes to. `ModuleStack.note_caller()` adds the module, the lines and the autograd
   node that call it.
2. Before it runs, the tape refers to all that it reads, and it keeps what it is about
   to write to. So `given` and `before()` have each tensor as it was.
3. It runs. The table adds where its non-finite values came from (`parents`, `masks`)
   and, where they began there, `details`.
4. It lets go of what it has returned, and of what it has read once the tape and the
   table do. What is left is what an explanation reads: names, lines, numbers, and other
   operations.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _C
from ..base.tensors import are_plain
from ..base.torch_ops import base_of, has, is_view, op_of
from ..base.tree import find, tensors_in
from ..guard.report.causes import UNDEFINED, UNKNOWN
from ..guard.report.op import Op
from ..torch_internals.replaying import schema_of
from .bounds import LEAP
from .leaves import Leaf
from .memory import TapedTensor, memory_of
from .tensor_kinds import Index, is_float
from .torch_calls import TorchCall
from .users_lines import Sites, place_text

WRITTEN = "{} is written by the code of this line or by torch within it"


@dataclass
class Details:
    """Facts about an operation that made a non-finite value.

    Attributes:
        op: What it was given and returned, without the line that called it.
        cause: The name of the cause, as far as the operation alone tells it.
        reason: In a sentence.
        last_index: Where the last non-finite value is in the first bad output.
        columns: The columns that hold them all, where these are few of many.
        part: Where it was computed again, in words, if not as a whole; or "".
        num_near: How many rows of its divisor are near 0, of how many; or none.
    """

    op: Op
    cause: str = UNKNOWN.name
    reason: str = ""
    last_index: Index | None = None
    columns: list[int] = field(default_factory=list)
    part: str = ""
    num_near: tuple[int, ...] = ()

    @property
    def has_bad_inputs(self) -> bool:
        """True if it was given non-finite values, which were meant."""
        return not all(each.is_finite for each in self.op.inputs)

    @property
    def is_overflow(self) -> bool:
        """True if its result in float64 is a number, which its own dtype has lost."""
        return self.op.true_value is not None and self.cause != UNDEFINED.name

    @property
    def divisor(self) -> float | None:
        """The divisor of a quotient that overflowed by it, or None."""
        numbers = self.op.operands
        is_quotient = op_of(base_of(self.op.name)).sign == "/" and len(numbers) == 2
        if not (is_quotient and self.is_overflow):
            return None
        of, by = map(abs, numbers)
        return numbers[1] if by < 1 and of * by < 1 else None


# Whatever they return or write to comes from other ranks, and may not be there yet.
_COMMUNICATION = ("c10d.", "_c10d_functional", "c10d_functional", "_dtensor.")
_WAITS = "wait_tensor"
# Batch norm's schemas do not say that it writes to these.
_STATISTICS = ("running_mean", "running_var")


@functools.cache
def _signature(func: Any) -> tuple[str, str, list[tuple[int, str, bool]], bool]:
    """The name of an operation, its base, the arguments that it writes to, if it views.

    Of these arguments the place, the name, and whether what was in it is not read.
    """
    name = str(func)
    base = base_of(name)
    schema, writes, overwrites = schema_of(func), [], has(base, "overwrites")
    if schema is not None and (schema.is_mutable or "batch_norm" in base):
        for place, argument in enumerate(schema.arguments):
            alias = argument.alias_info
            is_written = alias is not None and alias.is_write
            if is_written or argument.name in _STATISTICS:
                is_over = argument.is_out or (place == 0 and overwrites)
                writes.append((place, argument.name, is_over))
    return name.removesuffix(".default"), base, writes, is_view(func)


def name_of(func: Any) -> str:
    """The name of an operation, such as "aten.div.Tensor"."""
    return _signature(func)[0]


@dataclass(eq=False, repr=False, slots=True)
class OpCall:
    """A call of an operation.

    Attributes:
        func: The operation.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        number_of: See `OpObserver`.
        index: Its place in the order of execution.
        name: Its name, such as "aten.div.Tensor".
        base: The same without namespace and overload, such as "div".
        is_view: Whether what it returns is said to be a view of what it is given.
        arguments: The tensors that it is given.
        written: The tensors that it writes to.
        output: What it returned.
        returned: The tensors in that.
        memory: The numbers of the memory of all these tensors, by their `id`.
        fresh: The results that it has returned in memory of their own.
        is_taped: Whether the tape holds, or held, what it has read and written.
        given: The tensors that it was given as they were, by their `id`; if taped.
        results: The float tensors that it returned, and those that it wrote to; if
            taped.
        num_holders: How many hold its tensors; at first who runs it does.
        module: The name of the module that called it; None in backward.
        sites: The user's lines that led to it, the innermost first.
        thread: The thread that ran it.
        node: The name of the autograd node that called it, or "".
        node_sequence: The number of that node.
        custom: Whether the user's code called it within a backward.
        in_hook: Whether that was a hook on a gradient.
        variable: Where gradients are added up: whose.
        derivative_of: The operation whose derivative that node computes, if known.
        torch_call: The torch call that ran it, where these are recorded; else None.
        read_from: The operations that wrote what it has read.
        unwritten: The numbers of the memory that it has read, and none of them wrote.
        parents: What its non-finite inputs came from that are not meant.
        kinds: The kinds of non-finite values that it returned.
        abs_max: The largest magnitude of its first result; None if it has none.
        most_read: That of the floats that it has read; where its result is far larger,
            of all numbers that it was given.
        divisor: The least magnitude that it has divided by then, if it did.
        is_meant: Whether these are infs that the code asked for; see `meant_infs.py`.
        is_asked: Whether its bad values are a number of Python that it was given, or
            came from such, or from the batch.
        masks: The sources of the infs that it was given, where all of them are meant.
        reduces: Whether its infs are fewer than those: a mask has gone beyond itself.
        details: What is known of its inputs and outputs, where it made the bad value.
    """

    func: Any
    args: Any
    kwargs: Any
    number_of: Callable[[torch.Tensor], int] = memory_of
    index: int = 0
    name: str = field(init=False)
    base: str = field(init=False)
    is_view: bool = field(init=False)
    arguments: list[torch.Tensor] = field(init=False)
    written: list[torch.Tensor] = field(default_factory=list)
    output: Any = None
    returned: list[torch.Tensor] = field(default_factory=list)
    memory: dict[int, int] = field(init=False)
    fresh: list[torch.Tensor] = field(default_factory=list)
    is_taped: bool = False
    given: dict[int, TapedTensor] = field(default_factory=dict)
    results: list[TapedTensor] = field(default_factory=list)
    num_holders: int = 1
    module: str | None = None
    sites: Sites = ()
    thread: int = field(default_factory=threading.get_ident)
    node: str = ""
    node_sequence: int = -1
    custom: bool = False
    in_hook: bool = False
    variable: torch.Tensor | None = None
    derivative_of: OpCall | None = None
    torch_call: TorchCall | None = None
    read_from: tuple[OpCall, ...] = ()
    unwritten: tuple[int, ...] = ()
    parents: list[Source] = field(default_factory=list)
    kinds: int = 0
    abs_max: float | None = None
    most_read: float = 0.0
    divisor: float | None = None
    is_meant: bool = False
    is_asked: bool = False
    masks: list[Source] = field(default_factory=list)
    reduces: bool = False
    details: Details | None = None
    _overwritten: list[torch.Tensor] = field(default_factory=list)
    _kept: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name, self.base, writes, self.is_view = _signature(self.func)
        args, kwargs = self.args, self.kwargs
        self.arguments = tensors_in((args, kwargs))
        self.memory = {id(each): self.number_of(each) for each in self.arguments}
        for place, name, is_overwritten in writes:
            tensors = tensors_in(args[place] if place < len(args) else kwargs.get(name))
            self.written += tensors
            self._overwritten += tensors * is_overwritten
        if self.name.startswith("c10d.") and self._has_output_first():
            self._overwritten += tensors_in(args[0])

    def _has_output_first(self) -> bool:
        """True if a collective only writes to its first argument, as most do."""
        takes_two = len(self.args) > 1 and bool(tensors_in(self.args[1]))
        return takes_two or self.base.startswith("recv")

    # Its tensors.

    def read(self, floats: bool = True) -> list[torch.Tensor]:
        """The tensors whose values it reads.

        Args:
            floats: Whether to leave out those that can hold no nan, or nothing.
        """
        if self.is_constant:
            return []
        given = self.arguments
        if self._overwritten:
            given = [tensor for tensor in given if not self.overwrites(tensor)]
        if self.kwargs.get("beta") == 0:  # torch leaves out what it would add to
            given = given[1:]
        return [t for t in given if is_float(t) and t.numel()] if floats else given

    def overwrites(self, tensor: torch.Tensor) -> bool:
        """True if it writes to all of a tensor, whatever was in it."""
        return any(tensor is each for each in self._overwritten)

    def keep_written(self) -> None:
        """Keeps what it reads and then writes to, as it is before that.

        Of memory that the tape has copied there is no second copy.
        """
        for tensor in self.written:
            if not self.overwrites(tensor):
                taped = self.given.get(id(tensor))
                is_copied = taped is not None and taped.contents.is_held
                copy = taped.value if taped and is_copied else tensor.detach().clone()
                self._kept[id(tensor)] = copy

    def before(self, value: Any) -> Any:
        """A tensor that it was given as it was before it ran; what else, as it is."""
        return self._kept.get(id(value), value)

    def run(self) -> Any:
        """Runs it, and returns what it returned."""
        code = _C.OwnCode(False)  # it may be the program's
        with code:
            self.output = self.func(*self.args, **self.kwargs)
        is_one = type(self.output) is torch.Tensor
        self.returned = [self.output] if is_one else tensors_in(self.output)
        if not are_plain(self.returned):
            code.__enter__()  # so may be what looks at these
        given = () if self.is_constant else {*self.memory.values()} - {0}
        self.memory |= {id(each): self.number_of(each) for each in self.returned}
        self.fresh = [t for t in self.returned if self.memory[id(t)] not in given]
        return self.output

    @property
    def made(self) -> list[torch.Tensor]:
        """Results in fresh memory, and what it wrote to, of what can hold a nan."""
        written = [*self.fresh, *self.written]
        return [each for each in written if is_float(each) and each.numel()]

    @property
    def taped(self) -> list[TapedTensor]:
        """All that it has read or written, where it is taped."""
        return [*self.given.values(), *self.results]

    @property
    def is_held(self) -> bool:
        """True if all that it has read or written can be read still."""
        is_taped = self.is_taped and self.num_holders > 0
        return is_taped and all(each.contents.is_held for each in self.taped)

    def end(self) -> None:
        """Lets go of what it has returned, and of all unless others hold it.

        Autograd copies a gradient that somebody else refers to.
        """
        del self.output, self.returned, self.arguments, self.written
        del self.memory, self.fresh, self._overwritten, self._kept
        self.let_go()

    def let_go(self) -> None:
        """Lets go of what it has read, unless others hold it still."""
        self.num_holders -= 1
        if not self.num_holders:
            del self.args, self.kwargs, self.given, self.results

    # What it is.

    @property
    def is_communication(self) -> bool:
        """True if it takes part in a collective: other ranks may make its result."""
        return self.name.startswith(_COMMUNICATION)

    @property
    def waits(self) -> bool:
        """True if it waits for a collective, whose result it is given."""
        return self.is_communication and self.base == _WAITS

    @property
    def is_empty(self) -> bool:
        """True if it returns memory that nobody has written to."""
        return has(self.base, "empty")

    @property
    def is_constant(self) -> bool:
        """True if it makes a tensor of a number of Python."""
        return has(self.base, "constant")

    @property
    def numbers(self) -> list[float]:
        """The numbers of Python among its arguments that are nan or inf."""
        numbers = [number for _, number in find((self.args, self.kwargs), (float,))]
        return [number for number in numbers if not math.isfinite(number)]

    # What became of it.

    @property
    def text(self) -> str:
        """Its name and its line, such as "aten.log (train.py:9)"."""
        return f"{self.name}{place_text(self.sites)}"

    @property
    def place(self) -> tuple[object, ...]:
        """Its name, module, node and line, which tell it from others."""
        return self.name, self.module, self.node, self.sites[:1]

    @property
    def makes_bad(self) -> bool:
        """True if non-finite values that are not meant began here."""
        return bool(self.kinds) and not self.parents and not self.is_meant

    @property
    def is_leap(self) -> bool:
        """True if its result is large, and far larger than all that it was given."""
        return LEAP.is_passed(self.abs_max or 0.0, self.most_read)

    @property
    def in_backward(self) -> bool:
        """True if an autograd node called it, not a checkpointed forward."""
        return bool(self.node) and self.module is None

    @property
    def forward(self) -> OpCall | None:
        """In backward, the operation of the forward, if it is known; else itself."""
        found: OpCall | None = self
        for _ in range(5):  # a double backward's node was made in a backward
            is_own = found is not self and found is not None and found.custom
            if found is None or not found.in_backward or is_own:
                return found
            found = found.derivative_of
        return None

    @property
    def named(self) -> OpCall:
        """The operation that is named: of a derivative, that of the forward."""
        return self if self.custom else self.forward or self

    @property
    def owner(self) -> str:
        """The name of the module whose code it is of; in backward, that of its node."""
        found: OpCall | None = self
        for _ in range(4):
            if found is None or found.module is not None:
                break
            found = found.derivative_of
        return (found.module if found is not None else None) or ""


Source = OpCall | Leaf
