"""Why an operation made a bad value: it is computed again in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..base.tensors import PLAIN, real_parts, widened
from ..base.text import error_line
from ..base.torch_ops import draws, has, op_of
from ..base.tree import mapped, tensors_in
from ..guard.report.op import Op
from ..torch_internals.replaying import attention_by_definition, schema_names
from .bounds import is_near
from .mask_counts import MaskCounts, has_no_label
from .op_rows import EMPTY, INTERMEDIATE, RANGE, SINGULAR, UNDEFINED, Details
from .op_trace import OpCall
from .tensor_kinds import (
    NAN,
    Index,
    as_plain,
    bad_columns,
    bad_places,
    is_float,
    kinds_of,
    summary_of,
)
from .torch_calls import running_call

# Computes an operation again in float64.


_MAX_NUMEL = 2**27  # of all arguments together, which are copied


def in_float64(op: OpCall) -> tuple[Any, dict[int, torch.Tensor]]:
    """Runs it in float64: its output, and what it writes to, by what it wrote to."""
    written: dict[int, torch.Tensor] = {}

    def in_its_place(value: Any) -> Any:
        wide = _widened(op, value)
        if id(value) in op.kept:
            wide = written.setdefault(id(value), wide)
        return wide

    kinds = torch.Tensor, torch.dtype
    args, kwargs = mapped((op.args, op.kwargs), in_its_place, kinds=kinds)
    return run_in_float64(op.func, op.base, args, kwargs), written


def run_in_float64(func: Any, base: str, args: Any, kwargs: Any) -> Any:
    """Runs an operation whose arguments were widened, and returns its results.

    Raises:
        NotImplementedError: If that is not the same operation.
    """
    _require_repeatable(func, args, kwargs)
    if "half_to_float" in schema_names(func):  # as `_softmax` has
        args = (*args[:2], False)
    if base.startswith("_scaled_dot_product") and "backward" not in base:
        return _attention(func, args, kwargs)
    return func(*args, **kwargs)


def _require_repeatable(func: Any, args: Any, kwargs: Any) -> None:
    if not str(func).startswith(("aten.", "prims.")):
        raise NotImplementedError("an operation of an extension")
    if draws(func, args, kwargs):
        raise NotImplementedError("it draws random numbers")


def _widened(op: OpCall, value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    value = as_plain(op.kept.get(id(value), value)).detach()
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value.clone()


# The part of an operation that is too large to be copied.


_Cut = Callable[[torch.Tensor], torch.Tensor]


def _is_large(op: OpCall) -> bool:
    arguments = [*map(as_plain, tensors_in((op.args, op.kwargs)))]
    if any(type(t) not in PLAIN for t in arguments):
        raise NotImplementedError("a tensor subclass")
    return sum(tensor.numel() for tensor in arguments) > _MAX_NUMEL


def _part_of(
    op: OpCall, output: Any, bad: torch.Tensor, index: tuple[int, ...]
) -> tuple[OpCall, Any, torch.Tensor, tuple[int, ...]]:
    """The part of a large operation that makes one bad value, or its row.

    That it is the same computation is found by experiment: it is run as it was, and
    must return that part of the result.

    Args:
        op: The operation, which has run.
        output: What it returned.
        bad: Of that a tensor that is not finite.
        index: A place in it.

    Returns:
        The operation with parts of its arguments, its output, and `bad` and `index`
        there.

    Raises:
        NotImplementedError: If there is no such part, or it is too large as well.
    """
    _require_repeatable(op.func, op.args, op.kwargs)
    results = [t for t in tensors_in(output) if is_float(t)]
    place = next((i for i, each in enumerate(results) if each is bad), None)
    if op.written or place is None:
        raise NotImplementedError("too large")
    for axes, cuts in _cuts(op, bad, index):
        part = _cut(op, cuts)
        if _is_large(part):
            continue
        try:
            again = part.run()
        except (RuntimeError, IndexError):
            continue
        own = [t for t in tensors_in(again) if is_float(t)][place]
        bad_part = _narrowed(bad, dict(zip(axes, index, strict=False)))
        if is_near(real_parts(own), real_parts(bad_part)):
            inner = [0 if axis in axes else i for axis, i in enumerate(index)]
            return part, again, own, tuple(inner)
    raise NotImplementedError("too large")


def _cut(op: OpCall, cuts: Sequence[_Cut]) -> OpCall:
    left = iter(cuts)

    def part(value: Any) -> Any:
        return next(left)(value) if isinstance(value, torch.Tensor) else value

    args = tuple(map(part, op.args))
    return OpCall(op.func, args, {k: part(value) for k, value in op.kwargs.items()})


def _cuts(
    op: OpCall, bad: torch.Tensor, index: tuple[int, ...]
) -> Iterator[tuple[Sequence[int], list[_Cut]]]:
    """Yields axes of the result to cut, from the first on, and each argument's part."""
    values = *op.args, *op.kwargs.values()
    given = [each for each in values if isinstance(each, torch.Tensor)]
    every = range(len(index))

    def broadcast(tensor: torch.Tensor) -> torch.Tensor:
        missing = len(index) - tensor.dim()
        sizes = enumerate(tensor.shape)
        wanted = {axis: index[axis + missing] for axis, n in sizes if n > 1}
        return _narrowed(tensor, wanted)

    if torch.Tag.pointwise in op.func.tags:
        yield every, [broadcast] * len(given)
    elif has(op.base, "product"):
        batch = dict(enumerate(index[:-2]))
        last = len(index) - 1
        left = {**batch, last - 1: index[-2]}
        right = {**batch, last: index[-1]}
        cuts: list[_Cut] = [lambda t: _narrowed(t, left), lambda t: _narrowed(t, right)]
        yield every, [*[broadcast] * (len(given) - 2), *cuts]
    for axes in (every[:-1], every[:1]):
        for others in (True, False):

            def rows(tensor: torch.Tensor, of: range = axes) -> torch.Tensor:
                own = zip(tensor.shape, bad.shape, strict=False)
                same = [i for i, (n, m) in enumerate(own) if i in of and n == m]
                return _narrowed(tensor, {axis: index[axis] for axis in same})

            rest: _Cut = rows if others else _whole
            yield axes, [rows, *[rest] * (len(given) - 1)]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _narrowed(tensor: torch.Tensor, places: Mapping[int, int]) -> torch.Tensor:
    """One place of some axes of a tensor."""
    for axis, place in places.items():
        tensor = tensor.narrow(axis, place, 1)
    return tensor


def _attention(func: Any, args: Any, kwargs: Any) -> Any:
    """Fused attention by its definition."""
    names = schema_names(func)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    mask = given.get("attn_mask", given.get("attn_bias"))
    return attention_by_definition(
        *(given["query"], given["key"], given["value"]),
        attn_mask=mask,
        is_causal=given.get("is_causal", False),
        scale=given.get("scale"),
    )


_MADE_OF_NUMBERS = (
    "the code makes this tensor of values that torch has not computed, such as NumPy's"
)
_GIVEN = "it is given the number {}, by the code of this line or by torch within it"
_BY_NOTHING = "it divides by a sum that is 0, such as how many elements a mask selects"
_NO_LABELS = "the batch is empty: there is no label, and nothing to average"
_NO_LABEL_COUNTS = (
    "no label of the batch counts: all are ignored, those of every sample; labels come "
    "from the dataset and the collator: mend them there"
)


def details_of(
    op: OpCall,
    bad: Sequence[torch.Tensor],
    output: Any,
    mask_counts: MaskCounts,
) -> Details:
    """Looks at an operation that has just run.

    Args:
        op: The operation.
        bad: What it wrote that is non-finite.
        output: What it returned.
        mask_counts: Knows which of its inputs count the elements of a mask.
    """
    found = Details(Op(op.name))
    before = [op.kept.get(id(tensor), tensor) for tensor in op.read()]
    found.op.inputs = [summary_of(tensor) for tensor in before]
    found.op.outputs = [summary_of(tensor) for tensor in bad]
    places = new_places(bad[0], before)
    found.op.first_index, found.last_index = places or (None, None)
    found.op.limit = torch.finfo(bad[0].dtype).max
    is_quotient = has(op.base, "divides") and bool(op.args)
    found.divides_by_number = is_quotient and isinstance(op.args[-1], (int, float))
    try:
        found.op.outside = _outside_of_domain(op, found.op.first_index)
        found.op.operands = _operands(op, found.op.first_index)
        found.columns = bad_columns(bad[0])
        _classify(op, found, bad, output, mask_counts)
    except Exception as error:
        why = error_line(error, 80)
        found.reason = f"it could not be computed again in float64 ({why})"
    return found


def new_places(
    bad: torch.Tensor, read: Sequence[torch.Tensor]
) -> tuple[Index, Index] | None:
    """The first and last index of a non-finite value of a kind that was not read.

    A nan is new where only infs were read, as those of a mask.
    """
    kinds = [kinds_of(tensor) for tensor in read if is_float(tensor)]
    is_nan_new = any(kinds) and not any(each & NAN for each in kinds)
    places = bad_places(bad, nan_alone=True) if is_nan_new else None
    return bad_places(bad) if places is None else places


def _classify(
    op: OpCall,
    found: Details,
    bad: Sequence[torch.Tensor],
    output: Any,
    mask_counts: MaskCounts,
) -> None:
    why = _reduces_nothing(op, bad[0], output, mask_counts)
    if why:
        found.why, found.reason = EMPTY, why
        return
    why = _weighs_nothing(op, output)
    if why:
        found.why, found.reason = UNDEFINED, why
        return
    if op.is_constant or (op.numbers and not found.has_bad_inputs):
        found.why, found.reason = UNDEFINED, _MADE_OF_NUMBERS
        if not op.is_constant:
            found.reason = _needed_by_caller(op) or _GIVEN.format(op.numbers[0])
        return
    made, index = bad[0], found.op.first_index
    assert index is not None
    if _is_large(op):
        op, output, made, index = _part_of(op, output, made, index)
        found.part = f" at {list(found.op.first_index or ())} alone"
    reference, written = in_float64(op)
    results = [t for t in tensors_in(output) if is_float(t)]
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
        found.op.true_value = float(finite[finite.abs().argmax()])
        is_beyond = abs(found.op.true_value) > found.op.limit
        within = SINGULAR if _divides_by_pivots(op, found) else INTERMEDIATE
        found.why = RANGE if is_beyond else within
    elif has(op.base, "nan_of_overflow") and not found.has_bad_inputs:
        found.why, found.op.true_value = RANGE, math.inf
    elif math.isinf(first) and not found.has_bad_inputs and not _is_at_pole(op, index):
        found.why = RANGE
        found.op.true_value = first
    else:
        found.why = UNDEFINED
        found.op.true_value = first


def _divides_by_pivots(op: OpCall, found: Details) -> bool:
    """True if an infinite result is that of a pivot of 0: no product overflowed."""
    largest = max((each.abs_max or 0.0 for each in found.op.inputs), default=0.0)
    assert found.op.limit is not None
    # So no product of four entries overflows.
    return largest < found.op.limit**0.25 and has(op.base, "pivots")


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
        return _value_at(divisor, index) in (0.0, None)
    if op.base.removesuffix("_") == "pow":
        return _value_at(op.args[0], index) in (0.0, None)
    return not has(op.base, "grows")


def _value_at(value: Any, index: tuple[int, ...]) -> float | None:
    """The number that an elementwise operation takes from an argument at an index.

    None where the argument has no such place, as that of a product.
    """
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, torch.Tensor):
        return None
    if value.dim() > len(index) or value.is_complex():
        return None
    place = _own_place(value, index)
    is_there = all(i < n for i, n in zip(place, value.shape, strict=True))
    return float(value[place]) if is_there else None


def _operands(op: OpCall, index: tuple[int, ...] | None) -> list[float]:
    """The numbers that an elementwise operation has made one of; none if not known."""
    is_plain = op.kwargs.get("alpha", 1) == 1 and not op.kwargs.get("rounding_mode")
    if index is None or torch.Tag.pointwise not in op.func.tags or not is_plain:
        return []
    values = [_value_at(op.kept.get(id(each), each), index) for each in op.args]
    known = [each for each in values if each is not None]
    return known if len(known) == len(values) else []


def _own_place(value: torch.Tensor, index: tuple[int, ...]) -> tuple[int, ...]:
    """The place in an argument that is broadcast to a place of the result."""
    own = index[len(index) - value.dim() :]
    return tuple(0 if n == 1 else i for i, n in zip(own, value.shape, strict=True))


def _outside_of_domain(op: OpCall, index: tuple[int, ...] | None) -> str:
    """Names an argument that is outside of the operation's domain, and where."""
    base, row = op.base.removesuffix("_"), op_of(op.base)
    if "batch_norm" in base and "backward" not in base:
        return _negative_variance(op)
    if index is None or not op.args:
        return ""
    if base == "_ctc_loss" and len(index) == 1:
        return _too_few_frames(op, index[0])
    first = op.kept.get(id(op.args[0]), op.args[0])
    value = _value_at(first, index)
    is_number = value is not None and math.isfinite(value)
    if value is not None and is_number and not row.is_inside(value):
        texts = (f"{value:.{n}g}" for n in range(3, 18))
        shown = next(each for each in texts if not row.is_inside(float(each)))
        own = _at(first, shown, index)
        return f"its input is {own}; {base} needs one {row.needs}"
    if base == "pow" and len(op.args) > 1 and value is not None:
        power = _value_at(op.args[1], index)
        if power is None or not math.isfinite(power):
            return ""
        if (value < 0 and power != int(power)) or (value == 0 and power < 0):
            return f"its input is {_at(first, value, index)}, the exponent {power:g}"
    if row.above is not None and len(op.args) > 1:
        second = _value_at(op.args[1], index)
        if second is not None and second <= row.above:
            own = _at(op.args[1], second, index)
            return f"its second input is {own}; {base} needs one above {row.above:g}"
    is_plain = len(op.args) > 1 and op.kwargs.get("alpha", 1) == 1
    if row.sign and is_plain and value is not None:
        second = _value_at(op.kept.get(id(op.args[1]), op.args[1]), index)
        if second is not None and math.inf in (abs(value), abs(second)):
            at = f" at {list(index)}" if index else ""
            return f"it is {value:g} {row.sign} {second:g}{at}"
    if has(base, "softmax") and isinstance(first, torch.Tensor) and first.dim():
        return _masked_row(first, op.args[1], index)
    if base == "logsumexp" and isinstance(first, torch.Tensor) and first.dim():
        (dim, *others), place = op.args[1], list(index)
        if len(place) < first.dim():  # that dimension is gone from the result
            place.insert(dim % first.dim(), 0)
        return "" if others else _masked_row(first, dim, tuple(place))
    if base == "_weight_norm_interface" and isinstance(first, torch.Tensor):
        return _row_of_zeros(first, op.args[2] if len(op.args) > 2 else 0, index)
    if has(base, "pivots") and isinstance(first, torch.Tensor):
        return _singular_matrix(_widened(op, op.args[0]), index)
    if has(base, "divides") and len(op.args) > 1 and _value_at(op.args[1], index) == 0:
        if isinstance(op.args[1], torch.Tensor):
            return f"the divisor is {_at(op.args[1], 0.0, index)}"
        return f"the divisor is the number {op.args[1]:g}"
    return ""


def _masked_row(scores: torch.Tensor, dim: Any, index: tuple[int, ...]) -> str:
    """Names a row of a softmax that is -inf throughout: nothing is left to weigh."""
    if not isinstance(dim, int) or len(index) != scores.dim():
        return ""
    dim %= scores.dim()
    place: list[Any] = list(index)
    place[dim] = slice(None)
    row = scores[tuple(place)]
    if not bool((row == -math.inf).all()):
        return ""
    at = ", ".join(":" if i == dim else str(n) for i, n in enumerate(index))
    return f"all {row.numel()} scores at [{at}] are -inf"


def _singular_matrix(matrices: torch.Tensor, index: tuple[int, ...]) -> str:
    """Names a matrix whose determinant is 0, in float64 as well."""
    place = index[: matrices.dim() - 2]
    if bool(torch.linalg.det(matrices[place]) != 0):
        return ""
    at = f" at {list(place)}" if place else ""
    return f"the determinant of its matrix{at} is 0"


def _row_of_zeros(tensor: torch.Tensor, dim: int, index: tuple[int, ...]) -> str:
    """Names a row of a weight that has no direction: it is 0 throughout."""
    if bool(tensor.select(dim, index[dim]).any()):
        return ""
    at = ", ".join(str(n) if i == dim else ":" for i, n in enumerate(index))
    return f"all of its input at [{at}] is 0, whose norm it divides by"


def _too_few_frames(op: OpCall, sample: int) -> str:
    """Names a sample whose labels no alignment has: there are too few frames."""
    targets, frames, lengths = op.args[1], list(op.args[2]), list(op.args[3])
    num, before = int(lengths[sample]), sum(map(int, lengths[:sample]))
    own = targets[sample] if targets.dim() == 2 else targets[before:]
    num_repeated = int((own[1:num] == own[: num - 1]).sum()) if num > 1 else 0
    if int(frames[sample]) >= num + num_repeated:
        return ""
    more = f", {num_repeated} of them the same as the one before" * (num_repeated > 0)
    return f"sample {sample} has {int(frames[sample])} frames for {num} labels{more}"


def _at(value: Any, number: float | str, index: tuple[int, ...]) -> str:
    """A number with its place in a tensor, where that has several."""
    shown = number if isinstance(number, str) else f"{number:.3g}"
    if not isinstance(value, torch.Tensor) or value.numel() == 1:
        return shown
    return f"{shown} at {list(_own_place(value, index))}"


def _negative_variance(op: OpCall) -> str:
    """Names a running variance that a batch norm takes the root of below 0."""
    names = schema_names(op.func)
    given = {**dict(zip(names, op.args, strict=False)), **op.kwargs}
    variance, eps = given.get("running_var"), given.get("eps", given.get("epsilon", 0))
    if variance is None or given.get("training"):
        return ""
    places = (variance + eps <= 0).nonzero().flatten().tolist()
    if not places:
        return ""
    return f"running_var is {float(variance[places[0]]):.3g} at {places[:1]}"


def _reduces_nothing(
    op: OpCall, bad: torch.Tensor, output: Any, mask_counts: MaskCounts
) -> str:
    """Describes what it reduces, if that is nothing; else ""."""
    base = op.base.rstrip("_")
    read = [t for t in tensors_in(op.args) if t.is_floating_point() or t.is_complex()]
    if has(base, "of_labels"):
        counts = _NO_LABEL_COUNTS if op.args[1].numel() else _NO_LABELS
        return counts * has_no_label(op)
    if any(tensor.numel() == 0 for tensor in read):
        return f"{base} of a tensor without elements"
    if has(base, "deviation") and read and read[0].isfinite().all():
        why = f"{base} of one element: its divisor, 1 - correction, is 0"
        return why * _has_one_element(read[0], bad)
    places = bad_places(bad) if has(base, "divides") else None
    if places is not None and len(op.args) > 1:
        index, by = places[0], op.args[1]
        of = op.kept.get(id(op.args[0]), op.args[0])
        if _value_at(by, index) == 0 == _value_at(of, index):
            if mask_counts.sums_no_label(op.args[0]):
                return _NO_LABEL_COUNTS
            if any(by is count for count in mask_counts.counts_in(op)):
                return _BY_NOTHING
    return ""


_MEAN = 1  # of the ways to reduce a loss, as ATen numbers them


def _weighs_nothing(op: OpCall, output: Any) -> str:
    """Describes the class weights whose sum a mean is divided by, if that is 0."""
    if not has(op.base, "of_labels") or op.args[2] is None:
        return ""
    if op.args[3] != _MEAN:  # it divides by nothing
        return ""
    if float(tensors_in(output)[1]) != 0:
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
