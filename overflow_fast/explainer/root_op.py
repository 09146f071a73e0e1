"""Why an operation made a bad value: it is computed again in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ..base.tensors import real_parts, widened
from ..base.text import error_line
from ..base.torch_ops import has, op_of
from ..base.tree import tensors_in
from ..guard.report.causes import (
    CONSTANT,
    EMPTY_REDUCTION,
    RANGE_OVERFLOW,
    ROUNDING,
    UNDEFINED,
    UNDERFLOW,
)
from ..guard.report.op import Op
from .bounds import least_divisor
from .domain import outside_of_domain, value_at
from .float64 import in_float64, is_large, part_of, with_inputs_times
from .mask_counts import MaskCounts, has_no_label
from .memory import TapedTensor
from .op_call import WRITTEN, Details, OpCall
from .tensor_kinds import (
    NAN,
    Index,
    bad_columns,
    bad_places,
    is_float,
    kinds_of,
    summary_of,
)
from .torch_calls import running_call

_MADE_OF_NUMBERS = (
    "the code makes this tensor of values that no operation of torch has computed"
)
_SINGULAR = "in {} the matrix is singular: rounding has left 0 on its diagonal"
_SMALL = (
    "an intermediate value is too small for {}: with inputs {:.3g} times as large the "
    "result is finite"
)
_WITHIN = "an intermediate value is not finite in {}"
_BY_NOTHING = "it divides by a sum that is 0, such as how many elements a mask selects"
_NO_LABELS = "the batch is empty: there is no label, and nothing to average"
_NO_LABEL_COUNTS = (
    "no label of the batch counts: all are ignored, those of every sample; labels come "
    "from the dataset and the collator: mend them there"
)


def details_of(
    op: OpCall,
    bad: Sequence[torch.Tensor],
    mask_counts: MaskCounts,
    name_of: Callable[[torch.Tensor], str],
) -> Details:
    """Looks at an operation that has just run.

    Args:
        op: The operation.
        bad: What it wrote that is non-finite.
        mask_counts: Knows which of its inputs count the elements of a mask.
        name_of: Returns what a tensor was before the step, or "".
    """
    found = Details(Op(op.name))
    read = op.read()
    before = [op.before(tensor) for tensor in read]
    found.op.inputs = list(map(summary_of, before, map(name_of, read)))
    found.op.outputs = [summary_of(tensor) for tensor in bad]
    places = new_places(bad[0], before)
    found.op.first_index, found.last_index = places or (None, None)
    found.op.limit = torch.finfo(bad[0].dtype).max
    try:
        found.op.outside = outside_of_domain(op, found.op.first_index)
        found.op.operands = _operands(op, found.op.first_index)
        found.columns = bad_columns(bad[0])
        _classify(op, found, bad[0], mask_counts)
        if found.divisor is not None and isinstance(by := op.args[-1], torch.Tensor):
            is_near = by.detach().abs() < least_divisor(by.dtype)
            rows = is_near.reshape(len(by), -1).any(1) if by.dim() else is_near[None]
            found.num_near = int(rows.sum()), len(rows)
    except Exception as error:
        why = error_line(error, 80)
        found.reason = f"it could not be computed again in float64 ({why})"
    return found


def new_places(
    bad: torch.Tensor, read: Sequence[torch.Tensor]
) -> tuple[Index, Index] | None:
    """The first and last index of a non-finite value of a kind that was not read.

    A nan is new where none was read, and goes first: an inf beside it may be in no
    loss, or was read as well, as that of a mask.
    """
    is_nan_new = not any(kinds_of(each) & NAN for each in read if is_float(each))
    places = bad_places(bad, nan_alone=True) if is_nan_new else None
    return bad_places(bad) if places is None else places


def failed_place(op: OpCall) -> tuple[TapedTensor, Index] | None:
    """The first result of an operation that is not finite, and where it is new.

    None where it is not known, as of an operation that was not taped.
    """
    for own in op.results if op.is_held else ():
        if not bool(own.value.isfinite().all()):
            places = new_places(own.value, [each.value for each in op.given.values()])
            return None if places is None else (own, places[0])
    return None


def _classify(
    op: OpCall, found: Details, made: torch.Tensor, mask_counts: MaskCounts
) -> None:
    why = _reduces_nothing(op, made, mask_counts)
    if why:
        found.cause, found.reason = EMPTY_REDUCTION.name, why
        return
    why = _weighs_nothing(op)
    if why:
        found.cause, found.reason = UNDEFINED.name, why
        return
    if op.is_constant or (op.numbers and not found.has_bad_inputs):
        found.cause, found.reason = _written(op, made)
        return
    index = found.op.first_index
    assert index is not None
    if is_large(op):
        op, made, index = part_of(op, made, index)
        found.part = f" at {list(found.op.first_index or ())} alone"
    reference, written = in_float64(op)
    results = [t for t in op.returned if is_float(t)]
    references = [t for t in tensors_in(reference) if is_float(t)]
    pairs = list(zip(results, references, strict=False))
    true = [wide for own, wide in pairs if own is made]
    true = [written[id(made)]] if id(made) in written else true
    if not true or true[0].shape != made.shape:
        found.reason = "its float64 result has another shape"
        return
    _compare(op, found, made, true[0], index)


def _compare(
    op: OpCall,
    found: Details,
    bad: torch.Tensor,
    reference: torch.Tensor,
    index: tuple[int, ...],
) -> None:
    """Adds the result in float64 where the operation's own is not finite."""
    values = reference.detach()[~widened(bad).isfinite()]
    values = real_parts(values)
    assert found.op.limit is not None
    first = float(reference[index].real)
    finite = values[values.isfinite()]
    if math.isfinite(first) or (found.has_bad_inputs and finite.numel()):
        is_open = has(op.base, "grows") and not found.has_bad_inputs
        largest = values[~values.isnan()] if is_open else finite  # where no pole is
        found.op.true_value = float(largest[largest.abs().argmax()])
        dtype = found.op.outputs[0].dtype
        if abs(found.op.true_value) > found.op.limit:
            found.cause = RANGE_OVERFLOW.name
        elif _divides_by_pivots(op, found):
            found.cause, found.reason = ROUNDING.name, _SINGULAR.format(dtype)
        else:
            found.cause, factor = _lost_within(op, bad, reference)
            if found.cause != RANGE_OVERFLOW.name:  # else the first line has its size
                text = _SMALL if factor else _WITHIN
                found.reason = text.format(dtype, factor)
    elif has(op.base, "nan_of_overflow") and not found.has_bad_inputs:
        found.cause, found.op.true_value = RANGE_OVERFLOW.name, math.inf
    elif math.isinf(first) and not found.has_bad_inputs and not _is_at_pole(op, index):
        found.cause, found.op.true_value = RANGE_OVERFLOW.name, first
    else:
        found.cause, found.op.true_value = UNDEFINED.name, first


def _lost_within(
    op: OpCall, bad: torch.Tensor, reference: torch.Tensor
) -> tuple[str, float]:
    """Finds out which way an intermediate value has left the range of its dtype.

    The operation is run with larger inputs, and with smaller ones.

    Returns:
        The name of the cause, and of an underflow the factor at which it is finite.
    """
    is_lost = ~widened(bad).isfinite() & widened(reference).isfinite()
    exponent = int(math.log2(torch.finfo(bad.dtype).max)) + 1
    for power in (exponent // 8, exponent // 4, exponent // 2):
        larger = _is_finite_times(op, bad, is_lost, 2.0**power)
        if larger != _is_finite_times(op, bad, is_lost, 2.0**-power):
            if larger:
                return UNDERFLOW.name, 2.0**power
            return RANGE_OVERFLOW.name, 0.0
    return ROUNDING.name, 0.0


def _is_finite_times(
    op: OpCall, bad: torch.Tensor, places: torch.Tensor, factor: float
) -> bool:
    """True if the result is finite at some places with inputs times a number."""
    own = [t for t in op.returned if is_float(t)]
    found = [t for t in tensors_in(with_inputs_times(op, factor)) if is_float(t)]
    made = [new for old, new in zip(own, found, strict=True) if old is bad]
    return bool(made) and bool(widened(made[0])[places].isfinite().all())


def _divides_by_pivots(op: OpCall, found: Details) -> bool:
    """True if an infinite result is that of a pivot of 0: no product overflowed."""
    largest = max((each.abs_max or 0.0 for each in found.op.inputs), default=0.0)
    assert found.op.limit is not None
    # So no product of four entries overflows.
    return largest < found.op.limit**0.25 and has(op.base, "pivots")


def _written(op: OpCall, made: torch.Tensor) -> tuple[str, str]:
    """The cause and reason of an operation that has made it of numbers of Python."""
    if op.is_constant:
        is_one = not made.dim()
        text = WRITTEN.format(made.item()) if is_one else _MADE_OF_NUMBERS
        return CONSTANT.name, text
    needs, number = _needed_by_caller(op), op.numbers[0]
    is_undefined = needs or (kinds_of(made) & NAN and not math.isnan(number))
    cause = UNDEFINED if is_undefined else CONSTANT
    return cause.name, needs or WRITTEN.format(number)


def _needed_by_caller(op: OpCall) -> str:
    """The domain of a torch function that writes nan for anything else."""
    call = running_call()
    if call is None or call.name == op.base or not op_of(call.name).needs:
        return ""
    return f"{call.name} needs a {op_of(call.name).needs}"


def _is_at_pole(op: OpCall, index: tuple[int, ...]) -> bool:
    """True if an infinite result in float64 is that of a pole, such as 1 / 0."""
    if has(op.base, "divides"):
        divisor = op.args[-1]
        return value_at(divisor, index) in (0.0, None)
    if op.base.removesuffix("_") == "pow":
        return value_at(op.args[0], index) in (0.0, None)
    return not has(op.base, "grows")


def _operands(op: OpCall, index: tuple[int, ...] | None) -> list[float]:
    """The numbers that an elementwise operation has made one of; none if not known."""
    is_plain = op.kwargs.get("alpha", 1) == 1 and not op.kwargs.get("rounding_mode")
    if index is None or torch.Tag.pointwise not in op.func.tags or not is_plain:
        return []
    values = [value_at(op.before(each), index) for each in op.args]
    if op.base == "reciprocal":  # of a number that a tensor divides, or of 1
        call = op.torch_call
        is_quotient = call is not None and call.name == "rdiv"
        values.insert(0, float(call.operands[0]) if call and is_quotient else 1.0)
    known = [each for each in values if each is not None]
    return known if len(known) == len(values) else []


def _reduces_nothing(op: OpCall, bad: torch.Tensor, mask_counts: MaskCounts) -> str:
    """Describes what it reduces, if that is nothing; else ""."""
    base = op.base.rstrip("_")
    read = [t for t in tensors_in(op.args) if t.is_floating_point() or t.is_complex()]
    if has(base, "of_labels"):
        counts = _NO_LABEL_COUNTS if op.args[1].numel() else _NO_LABELS
        return counts * has_no_label(op)
    if any(tensor.numel() == 0 for tensor in read):
        return "its tensor has no elements"
    if has(base, "leaves_out_nan") and kinds_of(bad) == NAN == kinds_of(read[0]):
        return "it was given nothing but nan, which it leaves out"
    if has(base, "deviation") and read and read[0].isfinite().all():
        why = f"{base} of one element: its divisor, 1 - correction, is 0"
        return why * _has_one_element(read[0], bad)
    places = bad_places(bad) if has(base, "divides") else None
    if places is not None and len(op.args) > 1:
        index, by = places[0], op.args[1]
        if value_at(by, index) == 0 == value_at(op.before(op.args[0]), index):
            if mask_counts.sums_no_label(op.args[0]):
                return _NO_LABEL_COUNTS
            if any(by is count for count in mask_counts.counts_in(op)):
                return _BY_NOTHING
    return ""


_MEAN = 1  # of the ways to reduce a loss, as ATen numbers them


def _weighs_nothing(op: OpCall) -> str:
    """Describes the class weights whose sum a mean is divided by, if that is 0."""
    if not has(op.base, "of_labels") or op.args[2] is None:
        return ""
    if op.args[3] != _MEAN:  # it divides by nothing
        return ""
    if float(op.returned[1]) != 0:
        return ""
    labels, weight, ignored = op.args[1], op.args[2], op.args[4]
    classes = labels[labels != ignored].unique().tolist()
    weights = ", ".join(f"{float(weight[i]):g} of class {i}" for i in classes[:4])
    more = ", ..." * (len(classes) > 4)
    return (
        "the mean divides by the sum of the labels' class weights, which is 0: "
        f"{weights}{more}"
    )


def _has_one_element(tensor: torch.Tensor, result: torch.Tensor) -> bool:
    return tensor.numel() <= max(1, result.numel())
