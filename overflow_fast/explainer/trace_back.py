"""Walks back from bad values to the operation or the tensor where they began."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from .op_call import Leaf, OpCall, Source, is_meant
from .op_table import OpTable

OF_LEAVES = ("parameter", "buffer", "batch", "attribute", "weight", "object")
_KNOWN_LEAVES = (*OF_LEAVES, "gradient")


@dataclass
class RootOp:
    """Where the non-finite values of a tensor began.

    Attributes:
        source: The operation that made them, or the tensor that held them before.
        chain: The operations from there to the tensor.
        first_reader: The operation that read the source first, or None.
    """

    source: Source
    chain: list[OpCall] = field(default_factory=list)

    @property
    def first_reader(self) -> OpCall | None:
        """The operation that first used a tensor which was bad before, or None."""
        ops = [op for op in self.chain if op is not self.source]
        return ops[0] if ops else None


def trace_back(sources: Sequence[Source]) -> RootOp | None:
    """Finds the earliest origin of what is bad, infs that are meant left out.

    Args:
        sources: What wrote the bad values.

    Returns:
        The origin; None if all that is bad is meant, as far as can be seen.
    """
    child: dict[int, OpCall | None] = {}
    origins: list[Source] = []
    waiting: list[tuple[Source, OpCall | None]] = [(each, None) for each in sources]
    while waiting:
        source, reader = waiting.pop()
        if id(source) in child:
            continue
        child[id(source)] = reader
        if isinstance(source, OpCall) and source.parents:
            waiting += [(parent, source) for parent in source.parents]
        elif not is_meant(source):
            origins.append(source)
    if not origins:
        return None
    first = min(origins, key=_order)
    return RootOp(first, _chain(first, child))


def masked_whole(sources: Sequence[Source]) -> RootOp | None:
    """Finds where a mask's infs have gone beyond the mask, for a loss that holds them.

    That is the first operation which returns fewer values than the mask has, such as
    the sum of a row that is masked as a whole.

    Args:
        sources: What wrote the loss.
    """
    child: dict[int, OpCall | None] = {}
    reducing: list[OpCall] = []
    waiting: list[tuple[Source, OpCall | None]] = [(each, None) for each in sources]
    while waiting:
        source, reader = waiting.pop()
        if isinstance(source, Leaf) or id(source) in child:
            continue
        child[id(source)] = reader
        reducing += [source] * source.reduces
        waiting += [(each, source) for each in source.masks]
    if not reducing:
        return None
    first = min(reducing, key=_order)
    return RootOp(first, _chain(first, child))


def _order(source: Source) -> tuple[int, int]:
    if isinstance(source, OpCall):
        return 1, source.index
    is_before = source.kind in _KNOWN_LEAVES and not source.is_written
    return (0 if is_before else 2), 0


def _chain(first: Source, child: dict[int, OpCall | None]) -> list[OpCall]:
    chain = [first] if isinstance(first, OpCall) else []
    reader = child[id(first)]
    while reader is not None:
        chain.append(reader)
        reader = child[id(reader)]
    return chain


class ForwardOps:
    """Finds the forward operation whose derivative an autograd node computes.

    Autograd numbers its nodes as it makes them, just before their operation runs.

    Args:
        table: The operations of one replay.
    """

    def __init__(self, table: OpTable) -> None:
        self._ops = table.ops
        self._by_sequence: dict[int, list[OpCall]] = {}
        last: dict[int, int] = {}  # by thread
        for op in table.ops:
            if op.sequence > last.get(op.thread, -1):
                last[op.thread] = op.sequence
                self._by_sequence.setdefault(op.sequence, []).append(op)

    def of(self, op: OpCall) -> OpCall | None:
        """The forward operation, or None if it is not known."""
        for _ in range(4):  # a double backward's node was made in a backward
            found = self._node_of(op)
            if found is None or not found.in_backward or found.custom:
                return found
            op = found
        return None

    def calls_like(self, op: OpCall) -> list[OpCall]:
        """The calls of the same operation at the same line, in order, with the own one.

        In backward, those of the derivatives of one line's operation: of each node of
        autograd's the one at the same place, such as its gradient of a weight.
        """
        own = self._line_of(op)
        if own is None:
            return [op]
        alike = [
            each
            for each in self._ops
            if each.name == op.name and each.in_backward == op.in_backward
            if not op.in_backward or each.node == op.node
            if self._line_of(each) == own
        ]
        if not op.in_backward:
            return alike
        of_node: dict[tuple[int, int], list[OpCall]] = {}
        for each in alike:
            of_node.setdefault((each.thread, each.node_sequence), []).append(each)
        place = of_node[op.thread, op.node_sequence].index(op)
        return [ops[place] for ops in of_node.values() if len(ops) > place]

    def ops_before(self, op: OpCall) -> list[OpCall]:
        """The operations that ran before one, in order."""
        return self._ops[: op.index]

    def _line_of(self, op: OpCall) -> tuple[object, int] | None:
        named = self.of(op) if op.in_backward else op
        return named.sites[0][:2] if named is not None and named.sites else None

    def modules_from(self, op: OpCall) -> list[str]:
        """The names of the modules that ran from an operation on, in order, once."""
        names = [each.module for each in self._ops[op.index :] if each.module]
        return list(dict.fromkeys(names))

    def module_of(self, op: OpCall) -> str:
        """The module whose code an operation is of; in backward, that of its node."""
        current: OpCall | None = op
        for _ in range(4):
            if current is None or current.module is not None:
                break
            current = self._node_of(current)
        return (current.module if current is not None else None) or ""

    def _node_of(self, op: OpCall) -> OpCall | None:
        ops = [r for r in self._by_sequence.get(op.node_sequence, []) if r is not op]
        if len(ops) > 1:  # each thread counts for itself
            ops = [each for each in ops if _is_derivative(op.node, each.base)]
        return ops[0] if len(ops) == 1 else None


def _is_derivative(node: str, base: str) -> bool:
    """True if a node such as PowBackward0 is that of an operation such as pow."""
    of = re.sub(r"Backward\d*$", "", node.rpartition("::")[2]).lower()
    return base.replace("_", "").lower().startswith(of)
