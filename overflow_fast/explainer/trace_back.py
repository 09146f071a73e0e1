"""Walks back from bad values to the operation or the tensor where they began."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..base.torch_ops import base_of
from .op_rows import Leaf, Row, is_meant
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

    source: Row | Leaf
    chain: list[Row] = field(default_factory=list)

    @property
    def first_reader(self) -> Row | None:
        """The operation that first used a tensor which was bad before, or None."""
        rows = [row for row in self.chain if row is not self.source]
        return rows[0] if rows else None


def trace_back(sources: Sequence[Row | Leaf]) -> RootOp | None:
    """Finds the earliest origin of what is bad, infs that are meant left out.

    Args:
        sources: What wrote the bad values.

    Returns:
        The origin; None if all that is bad is meant, as far as can be seen.
    """
    child: dict[int, Row | None] = {}
    origins: list[Row | Leaf] = []
    waiting: list[tuple[Row | Leaf, Row | None]] = [(each, None) for each in sources]
    while waiting:
        source, reader = waiting.pop()
        if id(source) in child:
            continue
        child[id(source)] = reader
        if isinstance(source, Row) and source.parents:
            waiting += [(parent, source) for parent in source.parents]
        elif not is_meant(source):
            origins.append(source)
    if not origins:
        return None
    first = min(origins, key=_order)
    return RootOp(first, _chain(first, child))


def masked_whole(sources: Sequence[Row | Leaf]) -> RootOp | None:
    """Finds where a mask's infs have gone beyond the mask, for a loss that holds them.

    That is the first operation which returns fewer values than the mask has, such as
    the sum of a row that is masked as a whole.

    Args:
        sources: What wrote the loss.
    """
    child: dict[int, Row | None] = {}
    reducing: list[Row] = []
    waiting: list[tuple[Row | Leaf, Row | None]] = [(each, None) for each in sources]
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


def _order(source: Row | Leaf) -> tuple[int, int]:
    if isinstance(source, Row):
        return 1, source.index
    is_before = source.kind in _KNOWN_LEAVES and not source.is_written
    return (0 if is_before else 2), 0


def _chain(first: Row | Leaf, child: dict[int, Row | None]) -> list[Row]:
    chain = [first] if isinstance(first, Row) else []
    reader = child[id(first)]
    while reader is not None:
        chain.append(reader)
        reader = child[id(reader)]
    return chain


class ForwardRows:
    """Finds the forward operation whose derivative an autograd node computes.

    Autograd numbers its nodes as it makes them, just before their operation runs.

    Args:
        table: The operations of one replay.
    """

    def __init__(self, table: OpTable) -> None:
        self._rows = table.rows
        self._by_sequence: dict[int, list[Row]] = {}
        last: dict[int, int] = {}  # by thread
        for row in table.rows:
            if row.sequence > last.get(row.thread, -1):
                last[row.thread] = row.sequence
                self._by_sequence.setdefault(row.sequence, []).append(row)

    def of(self, row: Row) -> Row | None:
        """The forward operation, or None if it is not known."""
        for _ in range(4):  # a double backward's node was made in a backward
            found = self._node_of(row)
            if found is None or not found.in_backward or found.custom:
                return found
            row = found
        return None

    def calls_like(self, row: Row) -> list[Row]:
        """The calls of the same operation at the same line, in order, with the own one.

        In backward, those of the derivatives of one line's operation: of each node of
        autograd's the one at the same place, such as its gradient of a weight.
        """
        own = self._line_of(row)
        if own is None:
            return [row]
        alike = [
            each
            for each in self._rows
            if each.name == row.name and each.in_backward == row.in_backward
            if not row.in_backward or each.node == row.node
            if self._line_of(each) == own
        ]
        if not row.in_backward:
            return alike
        of_node: dict[tuple[int, int], list[Row]] = {}
        for each in alike:
            of_node.setdefault((each.thread, each.node_sequence), []).append(each)
        place = of_node[row.thread, row.node_sequence].index(row)
        return [rows[place] for rows in of_node.values() if len(rows) > place]

    def rows_before(self, row: Row) -> list[Row]:
        """The operations that ran before one, in order."""
        return self._rows[: row.index]

    def _line_of(self, row: Row) -> tuple[object, int] | None:
        named = self.of(row) if row.in_backward else row
        return named.sites[0][:2] if named is not None and named.sites else None

    def modules_from(self, row: Row) -> list[str]:
        """The names of the modules that ran from an operation on, in order, once."""
        names = [each.module for each in self._rows[row.index :] if each.module]
        return list(dict.fromkeys(names))

    def module_of(self, row: Row) -> str:
        """The module whose code a row belongs to; in backward, that of its node."""
        current: Row | None = row
        for _ in range(4):
            if current is None or current.module is not None:
                break
            current = self._node_of(current)
        return (current.module if current is not None else None) or ""

    def _node_of(self, row: Row) -> Row | None:
        rows = [r for r in self._by_sequence.get(row.node_sequence, []) if r is not row]
        if len(rows) > 1:  # each thread counts for itself
            rows = [each for each in rows if _is_derivative(row.node, each.name)]
        return rows[0] if len(rows) == 1 else None


def _is_derivative(node: str, op: str) -> bool:
    """True if a node such as PowBackward0 is that of an op such as aten.pow."""
    of = re.sub(r"Backward\d*$", "", node.rpartition("::")[2]).lower()
    return base_of(op).replace("_", "").lower().startswith(of)
