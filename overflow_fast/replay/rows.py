"""The parts of a table of operations: operations, and tensors from before."""

from __future__ import annotations

import functools
import threading

import torch

from .culprit import Details
from .kinds import NEGATIVE_INF, kinds_of
from .module_call import ModuleCall
from .op_call import OpCall
from .places import Frames

_CONSTANTS = ("buffer", "attribute", "weight")  # of models and other modules


class Leaf:
    """A tensor that no operation of the replay made, such as a weight.

    Attributes:
        kind: "parameter", "buffer", "batch", "gradient" or "unknown"; or see `Held`.
        name: Its name, or key.
        tensor: The tensor.
        is_read: Whether an operation has read non-finite values of it.
        is_written: Whether the replay has written to it; known of `Held` alone.
    """

    def __init__(self, kind: str, name: str, tensor: torch.Tensor | None) -> None:
        self.kind = kind
        self.name = name
        self.tensor = tensor
        self.is_read = self.is_written = False

    @functools.cached_property
    def is_mask(self) -> bool:
        """Tells whether it holds -inf alone; in a batch, with zeros alone."""
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
        parents: What its non-finite inputs came from that are not meant.
        kinds: The kinds of non-finite values that it returned.
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
        *("in_hook", "masks", "reduces"),
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
        """Tells whether an autograd node called it, not a checkpointed forward."""
        return bool(self.node) and self.module is None


Source = Row | Leaf


def is_meant(source: Source, kinds: int) -> bool:
    """Tells whether the infs of a source were asked for, as those of a mask are.

    Args:
        source: The source.
        kinds: The kinds of non-finite values that were read of it.
    """
    if isinstance(source, Row):
        return source.is_meant
    if source.kind == "unknown":  # such as a constant
        return kinds == NEGATIVE_INF
    return source.is_mask
