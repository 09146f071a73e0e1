"""One operation of a trace as a row, and the tensors that were there before."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from ..guard.report.op import Op
from ..torch_internals.replaying import autograd_node, next_sequence, sequence_of
from .op_trace import ModuleStack, OpCall
from .tensor_kinds import NAN, NEGATIVE_INF, Index, kinds_of
from .torch_calls import TorchCall
from .users_lines import Sites, runs_in_hook

RANGE, INTERMEDIATE, UNDEFINED = "range", "intermediate", "undefined"
EMPTY, SINGULAR, NOT_TRIED = "empty", "singular", ""


@dataclass
class Details:
    """Facts about an operation that made a non-finite value.

    Attributes:
        op: What it was given and returned, without the line that called it.
        why: RANGE, INTERMEDIATE, UNDEFINED, EMPTY, SINGULAR or NOT_TRIED.
        reason: In a sentence.
        last_index: Where the last non-finite value is in the first bad output.
        columns: The columns that hold them all, where these are few of many.
        divides_by_number: Whether it divides by a number of Python, and no tensor.
        part: Where it was computed again, in words, if not as a whole; or "".
    """

    op: Op
    why: str = NOT_TRIED
    reason: str = ""
    last_index: Index | None = None
    columns: list[int] = field(default_factory=list)
    divides_by_number: bool = False
    part: str = ""

    @property
    def has_bad_inputs(self) -> bool:
        """True if it was given non-finite values, which were meant."""
        return not all(each.is_finite for each in self.op.inputs)

    @property
    def is_overflow(self) -> bool:
        """True if its true result is a finite number."""
        return self.why in (RANGE, INTERMEDIATE) and self.op.true_value is not None


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
        """True if it holds -inf alone; in a batch, with zeros alone, and no graph."""
        values = self.tensor
        if values is None or kinds_of(values) != NEGATIVE_INF:
            return False
        if self.kind not in ("batch", "object"):
            return self.kind in _CONSTANTS
        is_sparse = not bool((values[values.isfinite()] != 0).any())
        return is_sparse and not values.requires_grad  # else it is a result, as of log


class Row:
    """One operation.

    Attributes:
        index: Its place in the order of execution.
        name: Its name, such as "aten.div.Tensor".
        module: The name of the module that called it; None in backward.
        sites: The user's lines that led to it, the innermost first.
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
        is_meant: Whether these are infs that the code asked for; see `is_meant()`.
        is_asked: Whether its infs are a number of Python that it was given.
        masks: The sources of the infs that it was given, where all of them are meant.
        reduces: Whether its infs are fewer than those: a mask has gone beyond itself.
        is_empty: Whether it returned memory that nobody has written to.
        is_communication: Whether other ranks may have made what it returned.
        details: What is known of its inputs and outputs, where it made the bad value.
        torch_call: The torch call that ran it, where these are recorded; else None.
    """

    __slots__ = (
        *("index", "name", "module", "sites", "node", "node_sequence", "sequence"),
        *("parents", "kinds", "is_meant", "is_empty", "details", "custom", "thread"),
        *("variable", "is_communication"),
        *("in_hook", "masks", "reduces", "read_from", "abs_max"),
        *("torch_call", "is_asked"),
    )

    def __init__(self, index: int, name: str, module: str | None, sites: Sites) -> None:
        self.index = index
        self.name = name
        self.module = module
        self.sites = sites
        self.thread = threading.get_ident()
        self.node = ""
        self.node_sequence = self.sequence = -1
        self.read_from: tuple[Row, ...] = ()
        self.abs_max: float | None = None
        self.parents: list[Source] = []
        self.masks: list[Source] = []
        self.kinds = 0
        self.is_meant = self.is_empty = self.custom = self.is_communication = False
        self.in_hook = self.reduces = self.is_asked = False
        self.details: Details | None = None
        self.variable: torch.Tensor | None = None
        self.torch_call: TorchCall | None = None

    @property
    def place(self) -> tuple[object, ...]:
        """Its name, module, node and line, which tell it from others."""
        return self.name, self.module, self.node, self.sites[:1]

    @property
    def makes_bad(self) -> bool:
        """True if non-finite values that are not meant began here."""
        return bool(self.kinds) and not self.parents and not self.is_meant

    @property
    def in_backward(self) -> bool:
        """True if an autograd node called it, not a checkpointed forward."""
        return bool(self.node) and self.module is None


def row_of(op: OpCall, modules: ModuleStack, index: int = 0) -> Row:
    """Makes the row of an operation that is about to run.

    Args:
        op: The operation.
        modules: Knows which module runs.
        index: Its place in the order of execution.
    """
    node: Any = autograd_node()
    sites = modules.lines()
    row = Row(index, op.name, modules.current(node is not None), sites)
    row.sequence = next_sequence() - 1
    if node is not None:
        row.node = str(node.name())
        row.node_sequence = sequence_of(node)
        row.variable = getattr(node, "variable", None)
        row.custom = bool(sites)
        row.in_hook = row.custom and runs_in_hook()
    return row


# Which infs are meant.
#
# A mask is made of -inf, of which a softmax makes 0. That is no failure, nor is what
# passes it on: a search for the origin of bad values does not end there. Where infs
# come from decides, never where they arrive, and a nan is never meant.
#
# - A tensor from before the replay is a mask (`Leaf.is_mask`) if it holds -inf and no
#   other kind: a buffer, or another constant of a module. In a batch or an object all
#   other values have to be 0, and without a graph: else it is data, or a result such as
#   a log. An unknown tensor is meant if -inf alone was read of it.
# - An operation that reads nothing bad has asked for its infs if they are -inf and it
#   was given such a number: `masked_fill(mask, -inf)`. +inf is always reported.
# - One that reads nothing bad but what is meant passes that on (`returns_meant`). Where
#   it returns other kinds, or fewer values (`Row.reduces`: all of a row may have been
#   masked), it is computed again in float64, and its infs are meant unless the true
#   result is finite: an overflow beside a mask is reported.
#
# If the loss itself holds infs that are meant, the mask has gone beyond itself: at the
# first operation that `reduces`, found by `Row.masks` (`masked_whole`).

Source = Row | Leaf


def is_meant(source: Source, kinds: int = 0) -> bool:
    """True if the infs of a source were asked for, as those of a mask are.

    Args:
        source: The source.
        kinds: The kinds of non-finite values that were read of it; 0 at the end of a
            search, where an unknown tensor is the origin.
    """
    if isinstance(source, Row):
        return source.is_meant
    if source.kind == "unknown":  # such as a constant
        return kinds == NEGATIVE_INF
    return source.is_mask


def returns_meant(op: OpCall, kinds: int, given: int) -> bool:
    """True if an operation has asked for its infs, or passes on infs that are meant.

    Args:
        op: The operation, which has read nothing bad but what is meant.
        kinds: The kinds of non-finite values that it has returned.
        given: The kinds that it has read.
    """
    if kinds & NAN:
        return False
    if not given:
        return kinds == NEGATIVE_INF and bool(op.is_constant or op.numbers)
    return not kinds & ~given
