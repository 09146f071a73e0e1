"""Doubts about a maker: inputs that were not searched, -inf that is no mask."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ... import _C
from ...base.module_kinds import is_layer_of_torch
from ...base.text import either
from ...base.tree import label_text
from ..watching.inputs import is_mask
from .bad_frames import BadFrame
from .call_order import Called
from .given import caller_of, held, place_of
from .kept_state import Bad
from .verdict import BATCH


class Doubt(NamedTuple):
    """Another possible maker of a value: in words, and by its names as candidates."""

    words: str
    names: Sequence[str]


def either_of(words: Iterable[str]) -> str:
    """Lists who may have made a value, cut after a number of them."""
    return either(words, 6)


def unsearched_inputs(
    called: Called, frame: BadFrame | None, chain: Sequence[Called]
) -> Iterator[Doubt]:
    """Yields the inputs of a call, or of the root, that were not searched.

    Tensors that are not scanned may be bad; objects only where the call has no other
    input and what the root was given is not known.
    """
    if is_layer_of_torch(called.module):
        return
    around = chain[chain.index(called) + 1 :]
    outermost = chain[-1]
    given = outermost.watch.inputs.given.get(outermost.call.batch)
    given = None if outermost.call.module else given
    caller = caller_of(called.watch)
    if given is not None and given.unseen:
        words = f"{', '.join(given.unseen)} of {outermost.name} was not searched"
    else:
        inputs = [] if frame is None else _inputs_of(frame)
        odd = [e for e in inputs if e.kind == _C.EntryKind.NOT_SCANNED]
        has_tensors = any(e.kind == _C.EntryKind.TENSOR for e in inputs)
        if not (odd or has_tensors or (given and not around)):
            odd = [e for e in inputs if e.kind == _C.EntryKind.NOT_TENSOR]
        if not odd:
            return
        labels = ", ".join(label_text(entry.label) for entry in odd)
        words = f"{labels} of {called.name} was not searched"
    outside = [] if given is not None and not given.unseen else [BATCH, caller]
    names = [each.name for each in around] + outside
    yield Doubt(f"{either_of(names)}; {words}" if names else words, names)


def _inputs_of(frame: BadFrame) -> list[_C.Entry]:
    return [entry for entry in frame.entries if entry.role == _C.Role.INPUT]


def minus_infs(
    called: Called, frame: BadFrame | None, chain: Sequence[Called], bad: Bad
) -> Iterator[Doubt]:
    """Yields the -inf that a call, or the root, was given, where that is no mask."""
    inputs = [] if frame is None else minus_inf_inputs(frame)
    if frame is None or not inputs:
        return
    around, outermost = chain[chain.index(called) + 1 :], chain[-1]
    is_given = any(_is_mask(frame, entry.label) is False for entry in inputs)
    givers = [each.name for each in around] if is_given else []
    root = bad.get((id(outermost.watch), outermost.call.order))
    odd = [
        entry
        for entry in ([] if root is None else minus_inf_inputs(root))
        if root is not None and _is_mask(root, entry.label) is not True
    ]
    if not (odd or givers):
        return
    places = [] if root is None else [place_of(root, e) for e in odd]
    outside = [BATCH, caller_of(called.watch)] if places or root is None else []
    where = f" in {', '.join(places)}" if places else ""
    names = [*givers, *outside]
    yield Doubt(f"{either_of(names)}, which passed on -inf{where}", names)


def minus_inf_inputs(frame: BadFrame) -> list[_C.Entry]:
    return [
        entry
        for entry in _inputs_of(frame)
        if entry.nonfinite_kinds == _C.NEGATIVE_INF and not entry.is_bad
    ]


def _is_mask(frame: BadFrame, label: _C.Label) -> bool | None:
    """True if an input that holds -inf is an additive mask; None if it may be.

    A mask holds 0 besides, and comes with something to mask.
    """
    is_known = is_mask(held(frame, label).unchanged())
    stats = [(e, e.stat) for e in frame.entries if e.stat is not None]
    lowest = next((stat.abs_min for e, stat in stats if e.label == label), None)
    others = [e for e, _ in stats if e.role == _C.Role.INPUT and e.label != label]
    if is_known is not None:
        return is_known and bool(others)
    return None if others and lowest in (0, math.inf) else False
