"""Which operation has cut a number off to the 0 that a later one is not defined for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ..base.torch_ops import has
from ..guard.report.gist import told_number
from .memory import TapedTensor
from .op_call import OpCall
from .root_op import new_places
from .tensor_kinds import Index
from .users_lines import place_text


def cut_off_text(ops: Sequence[OpCall]) -> str:
    """Names what made the 0 that the last of some operations was given, or "".

    It is looked for at the place of what failed, through what is 0 of a 0 there.

    Args:
        ops: The operations, as a table of operations holds them.
    """
    waiting = list[tuple[OpCall, TapedTensor, Index]]()
    for op in [each for each in ops[-1:] if each.is_held]:
        bad = [e for e in op.results if not bool(e.value.isfinite().all())]
        read = [each.value for each in op.given.values()]
        places = new_places(bad[0].value, read) if bad else None
        waiting += [(op, bad[0], places[0])] if places else []
    while waiting:
        op, result, index = waiting.pop()
        for given, value, at in _given_at(op, result, index):
            found = _made_by(given, op, at) if value == 0 else None
            if found is None:
                continue
            maker, own, place = found
            values = [number for _, number, _ in _given_at(maker, own, place)]
            cut = [each for each in values[:1] if each and math.isfinite(each)]
            if has(maker.base, "cuts") and cut:
                name = maker.base.rstrip("_") + place_text(maker.sites)
                return f"{name} made it 0, of {told_number(cut[0])}"
            if _keeps_zero(maker):
                waiting.append(found)
    return ""


def _keeps_zero(op: OpCall) -> bool:
    """True if each of its results is 0 where a number that it was given there is."""
    is_times = has(op.base, "bilinear") and has(op.base, "commutes")
    is_root = has(op.base, "root") and has(op.base, "each")
    return is_times or is_root or has(op.base, "same")


def _given_at(
    op: OpCall, result: TapedTensor, index: Index
) -> Iterator[tuple[TapedTensor, float, int]]:
    """Yields what made an element of a result: the tensor, the number, its place."""
    for each in op.given.values():
        value = each.value
        fits = len(value.shape) <= len(result.size) and all(
            own in (1, size)
            for own, size in zip(value.shape[::-1], result.size[::-1], strict=False)
        )
        if each.is_float and fits:
            wide = value.broadcast_to(result.size)
            steps = zip(index, wide.stride(), strict=True)
            yield each, float(wide[index]), each.offset + sum(i * n for i, n in steps)


def _made_by(
    tensor: TapedTensor, op: OpCall, at: int
) -> tuple[OpCall, TapedTensor, Index] | None:
    """Finds who has written to a place of memory that an operation reads."""
    for maker in reversed(op.read_from):
        for own in maker.results if maker.num_holders and maker.is_held else ():
            if own.memory == tensor.memory and own.dtype == tensor.dtype:
                index = own.index_of(at)
                if index is not None:
                    return maker, own, index
    return None
