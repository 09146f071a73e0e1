"""Finds the sample of the batch from which a bad value comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..guard.report import notes
from ..guard.report.causes import DIVERGENCE, NOT_REPRODUCIBLE
from ..guard.report.explanation import Explanation
from ..guard.report.op import Sample
from .calls import Call, batch_size, why_whole
from .halving import Halving
from .leaves import Leaf
from .op_call import OpCall
from .replayer import Replayer, ReplayResult, StepPart
from .sentinel import outliers_in, sentinel_in
from .tensor_kinds import as_wide, is_float
from .trace_back import RootOp

COMPUTED = ("forward", "backward")  # phases in which samples go their own ways
_INDEX_KEYS = ("index", "indices", "idx", "sample_index", "sample_id", "id", "ids")


class _SpentError(Exception):
    """The budget has ended before the sample was known."""


def find_sample(
    found: Explanation,
    root_op: RootOp,
    replayer: Replayer,
    place: int,
    may_run: Callable[[int], bool],
    traced: ReplayResult,
) -> ReplayResult | None:
    """Adds the sample to an explanation, where it is one alone.

    A bad value in the batch tells by itself. Else the step is replayed with one half of
    the batch after another, and what is found with all others: a sample is named if the
    same operation fails with it alone, and the step is finite without it.

    Returns:
        The replay of the other samples, if one was found so.
    """
    call, source = replayer.calls[place], root_op.source
    size = batch_size(call)
    if size is None and isinstance(source, Leaf) and not why_whole(call):
        size = _usual_size(call)
    if size is None or found.phase == "weights":
        why = why_whole(call)
        if why:
            found.notes.append(f"The samples of the batch were not compared: {why}.")
        return None
    found.num_samples, others = size, None
    if isinstance(source, Leaf):
        index = _only_bad(source.tensor, size) if source.kind == "batch" else None
    elif (
        size < 2
        or found.phase not in COMPUTED
        or found.cause in (NOT_REPRODUCIBLE.name, DIVERGENCE.name)  # of all samples
        or not replayer.ranks.can_cut(place)
    ):
        index = None
    else:

        def run(
            rows: Sequence[int], has_table: bool = True, has_backward: bool = True
        ) -> ReplayResult:
            if not may_run(1):
                raise _SpentError
            part = StepPart(
                *(place, tuple(rows)), has_table=has_table, has_backward=has_backward
            )
            return replayer.run(part)

        try:
            index, others = _halved(source, size, run, traced)
        except _SpentError:
            index = None
            found.notes.append(notes.WHICH_SAMPLE)
    if index is not None:
        dataset, outlier = _dataset_index(call, index, size), None
        is_of_size = found.is_overflow or found.lost_by is not None
        sentinel = sentinel_in(call, index) if found.phase in COMPUTED else None
        if sentinel is not None:
            found.evidence.insert(1, sentinel.text)
        elif is_of_size:
            outlier = next(outliers_in(call, index), None)
        text = "" if outlier is None else outlier.text
        found.sample = Sample.of(index, dataset, text)
    return others


def _usual_size(call: Call) -> int | None:
    """The size of dimension 0 of most tensors, where others hold all labels in one."""
    sizes = [len(tensor) for _, tensor in call.leaves() if tensor.dim()]
    most = max(sizes, key=sizes.count, default=0)
    return most if 2 * sizes.count(most) > len(sizes) > 2 else None


def _only_bad(tensor: torch.Tensor | None, size: int) -> int | None:
    values = None if tensor is None else as_wide(tensor)
    if values is None or values.dim() == 0 or len(values) != size:
        return None
    bad = ~values.isfinite().reshape(size, -1).all(1)
    places = bad.nonzero().flatten().tolist()
    return places[0] if len(places) == 1 else None


def _halved(
    source: OpCall,
    size: int,
    run: Callable[..., ReplayResult],
    traced: ReplayResult,
) -> tuple[int | None, ReplayResult | None]:
    """The sample with which alone the same operation fails, and not without it.

    Backwards are run where the forward alone did not show it. The other samples are run
    with theirs, since that is a remedy, too.

    Args:
        source: The operation.
        size: How many samples there are.
        run: Replays the step with some of them.
        traced: The replay with all.

    Returns:
        The sample, and the replay of the others, which is finite; else None.
    """
    stays_within, has_backward = traced.is_clean, not traced.is_forward

    def fails(rows: Sequence[int]) -> bool:
        """True if a part of the batch fails at the same place."""
        result = run(rows, has_backward=has_backward)
        is_bad = stays_within or result.is_forward or result.is_in_gradients
        is_bad = is_bad or bool(result.bad_buffers)
        return result.error is None and is_bad and _begins_again(source, result)

    first, last = _guesses(source, size) or (None, None)
    if last is not None and last != first and fails([last]):
        return None, None  # as it did among the others: there are several
    found = first
    if found is None or not fails([found]):
        search = Halving(size)
        is_seen = False  # with this sample alone
        for half in search:
            is_within = fails(half)
            is_seen = is_within and len(half) == 1
            search.note(is_within)
        found = search.place
        if not is_seen and not fails([found]):
            return None, None
    rows = [i for i in range(size) if i != found]
    others = run(rows, has_table=stays_within)
    is_finite = others.is_clean and not _begins_again(source, others)
    return (found, others) if is_finite else (None, None)


def _begins_again(source: OpCall, result: ReplayResult) -> bool:
    """True if bad values have begun at the place of an operation in another replay."""
    ops = [] if result.table is None else result.table.ops
    same = [each for each in ops if each.place == source.place]
    return any(e.makes_bad or (source.reduces and e.reduces) for e in same)


def _guesses(source: OpCall, size: int) -> tuple[int, int] | None:
    """The samples that the indices of the first and last bad value point to."""
    details = source.details
    if details is None or not details.op.first_index or not details.op.outputs:
        return None
    length = details.op.outputs[0].shape[0]
    if length % size or not details.last_index:
        return None
    each = length // size
    return details.op.first_index[0] // each, details.last_index[0] // each


def _dataset_index(call: Call, index: int, size: int) -> int | None:
    """The sample's index in the dataset, where the batch has it."""
    for name, path, tensor in call.places():
        key = path[-1].value if path else name
        is_index = key in _INDEX_KEYS and not is_float(tensor)
        # Without a training, an argument of that name has token ids.
        is_index &= bool(path) or call.has_backward is not False
        if is_index and tensor.dim() == 1 and len(tensor) == size:
            return int(tensor[index])
    return None
