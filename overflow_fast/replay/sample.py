"""Which sample of the batch the bad value comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .capture import KeptCall, batch_size, why_whole
from .explanation import Explanation, Sample
from .op_trace import Leaf, Row
from .replayer import Replayer, StepPart
from .slice import RootOp, find_root_op
from .tensor_kinds import as_wide, is_float

_INDEX_KEYS = ("index", "indices", "idx", "sample_index", "sample_id", "id", "ids")


def find(
    found: Explanation,
    root_op: RootOp,
    replayer: Replayer,
    place: int,
    may_run: Callable[[int], bool],
) -> None:
    """Adds the sample to an explanation, where it is one alone.

    A bad value in the batch tells by itself. Else the step is replayed with one half of
    the batch after another, and what is found with all others: a sample is named if the
    same operation fails with it alone, and the step is finite without it.
    """
    call = replayer.calls[place]
    size = batch_size(call)
    if size is None or found.phase == "weights":
        why = why_whole(call)
        if why:
            found.notes.append(f"The samples of the batch were not compared: {why}.")
        return
    found.num_samples = size
    source = root_op.source
    if isinstance(source, Leaf):
        index = _only_bad(source.tensor, size) if source.kind == "batch" else None
    elif (
        size < 2
        or found.phase not in ("forward", "backward")
        or found.cause == "not reproducible"
        or not replayer.ranks.can_cut(place)
    ):
        index = None
    else:
        index = _halved(source, replayer, place, size, may_run)
    if index is not None:
        found.sample = Sample.of(index, _dataset_index(call, index, size))


def _only_bad(tensor: torch.Tensor | None, size: int) -> int | None:
    values = None if tensor is None else as_wide(tensor)
    if values is None or values.dim() == 0 or len(values) != size:
        return None
    bad = ~values.isfinite().reshape(size, -1).all(1)
    places = bad.nonzero().flatten().tolist()
    return places[0] if len(places) == 1 else None


def _halved(
    source: Row,
    replayer: Replayer,
    place: int,
    size: int,
    may_run: Callable[[int], bool],
) -> int | None:
    """The sample with which alone the same operation fails, and not without it."""
    left = _guess(source, size) or list(range(size))
    if len(left) == 1 and not (may_run(1) and _fails(replayer, place, left, source)):
        left = list(range(size))
    while len(left) > 1:
        if not may_run(1):
            return None
        half = left[: len(left) // 2]
        left = half if _fails(replayer, place, half, source) else left[len(half) :]
        if len(left) == 1 and not (
            may_run(1) and _fails(replayer, place, left, source)
        ):
            return None
    others = [i for i in range(size) if i != left[0]]
    is_only = may_run(1) and not _fails(replayer, place, others, None)
    return left[0] if is_only else None


def _guess(source: Row, size: int) -> list[int] | None:
    """The sample that the index of the first bad value points to."""
    details = source.details
    if details is None or not details.first_index or not details.outputs:
        return None
    length = details.outputs[0].shape[0]
    if length % size:
        return None
    return [details.first_index[0] // (length // size)]


def _fails(
    replayer: Replayer, place: int, rows: Sequence[int], source: Row | None
) -> bool:
    """Tells whether a part of the batch fails: at the same place, or anywhere."""
    result = replayer.run(StepPart(place, tuple(rows)))
    if source is None:
        return result.error is not None or not result.is_clean
    is_bad = result.bad_outputs or result.bad_gradients
    if result.error is not None or result.table is None or not is_bad:
        return False
    again = find_root_op(result, replayer.models)
    other = None if again is None else again.source
    return isinstance(other, Row) and _place_of(other) == _place_of(source)


def _place_of(row: Row) -> tuple[Any, ...]:
    return row.name, row.module, row.node, row.frames[:1]


def _dataset_index(call: KeptCall, index: int, size: int) -> int | None:
    """The sample's index in the dataset, where a key of the batch is called that."""
    for name, path, tensor in call.places():
        key = path[-1].value if path else name
        is_index = key in _INDEX_KEYS and not is_float(tensor)
        if is_index and tensor.dim() == 1 and len(tensor) == size:
            return int(tensor[index])
    return None
