"""Walks back from bad values to the operation or the tensor where they began."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..base.torch_ops import has
from ..guard.report.causes import CONSTANT, EMPTY_REDUCTION, UNDEFINED
from .leaves import Leaf
from .meant_infs import is_meant
from .op_call import OpCall, Source
from .tensor_kinds import NAN


@dataclass
class RootOp:
    """Where the non-finite values of a tensor began.

    Attributes:
        source: The operation that made them, or the tensor that held them before.
        chain: The operations from there to the tensor.
        zero: The division that made 0 of its infs, which are seen again behind one
            that is not defined for 0; None for none.
        first_reader: The operation that read the source first, or None.
    """

    source: Source
    chain: list[OpCall] = field(default_factory=list)
    zero: OpCall | None = None

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
    child = readers_before(sources, lambda op: op.parents)
    ends = [e for e in child if isinstance(e, Leaf) or not e.parents]
    found = _first_of([each for each in ends if not is_meant(each)], child)
    return found and (_behind_zero(found) or _behind_left_out(found) or found)


def _behind_left_out(found: RootOp) -> RootOp | None:
    """The nan that a sum has left out, where it was given nothing else to average.

    None where the code has written it, as for what is to be left out.
    """
    op = found.source
    if not isinstance(op, OpCall) or _cause_of(op) != EMPTY_REDUCTION.name:
        return None
    for each in op.read_from:
        is_it = has(each.base, "leaves_out_nan")
        behind = trace_back([e for e in each.read_from if is_it and e.kinds & NAN])
        if behind is not None and _cause_of(behind.source) != CONSTANT.name:
            return RootOp(behind.source, [*behind.chain, each, *found.chain])
    return None


def _cause_of(source: Source) -> str:
    details = source.details if isinstance(source, OpCall) else None
    return "" if details is None else details.cause


def _behind_zero(found: RootOp) -> RootOp | None:
    """The inf that a division has made 0, where that is what an operation was given.

    Only of numbers none of which is 0: their quotient is 0 as a whole by the inf alone.
    """
    op = found.source
    if _cause_of(op) != UNDEFINED.name:
        return None
    child = readers_before([op], lambda each: each.read_from)
    ops = [each for each in child if isinstance(each, OpCall) and each.makes_bad]
    for bad in sorted(ops, key=lambda each: each.index):
        way = _way(bad, child)
        zero = next((e for e in way if not (e.kinds or has(e.base, "moves"))), None)
        if zero is None or not has(zero.base, "divides"):
            continue
        others = [each for each in zero.read_from if each not in way]
        zeros = way[way.index(zero) : -1]
        is_by_inf = bool(others) and all(each.abs_max for each in others)
        if is_by_inf and all(each.abs_max == 0 for each in zeros):
            return RootOp(bad, way + found.chain[1:], zero)
    return None


def masked_whole(sources: Sequence[Source]) -> RootOp | None:
    """Finds where a mask's infs have gone beyond the mask, for a loss that holds them.

    That is the first operation which returns fewer values than the mask has, such as
    the sum of a row that is masked as a whole.

    Args:
        sources: What wrote the loss.
    """
    child = readers_before(sources, lambda op: op.masks)
    ops = [each for each in child if isinstance(each, OpCall)]
    return _first_of([op for op in ops if op.reduces], child)


def memory_before(ops: Sequence[OpCall]) -> set[int]:
    """The numbers of the memory that operations depend on, and none has written."""
    before = readers_before(ops, lambda op: op.read_from)
    return {n for e in before if isinstance(e, OpCall) for n in e.unwritten}


Readers = dict[Source, OpCall | None]


def readers_before(
    sources: Sequence[Source], before: Callable[[OpCall], Sequence[Source]]
) -> Readers:
    """All that lies before some sources and these, each with what has read it.

    Args:
        sources: Where to begin.
        before: Returns the sources before an operation.
    """
    child: Readers = {}
    waiting: list[tuple[Source, OpCall | None]] = [(each, None) for each in sources]
    while waiting:
        source, reader = waiting.pop()
        if source not in child:
            child[source] = reader
            if isinstance(source, OpCall):
                waiting += [(each, source) for each in before(source)]
    return child


def _first_of(origins: Sequence[Source], child: Readers) -> RootOp | None:
    """The earliest of several origins, with the way from there."""
    if not origins:
        return None
    first = min(origins, key=_order)
    return RootOp(first, _way(first, child))


def _way(source: Source, child: Readers) -> list[OpCall]:
    """The operations from a source on, which is the first of them if it is one."""
    way = [source] if isinstance(source, OpCall) else []
    reader = child[source]
    while reader is not None:
        way.append(reader)
        reader = child[reader]
    return way


def _order(source: Source) -> tuple[int, int]:
    if isinstance(source, OpCall):
        return 1, source.index
    is_before = source.kind != "unknown" and not source.is_written
    is_before &= not (source.is_unkept or source.is_usual)
    return (0 if is_before else 2), 0
