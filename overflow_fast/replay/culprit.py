"""Why an operation made a non-finite value: it is computed again in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..tree import tensors_in
from .in_float64 import Call, in_float64
from .kinds import first_bad, is_float, summary_of
from .named_op import TensorSummary

_DEGREES = {"std", "var", "std_mean", "var_mean", "std_correction", "var_correction"}
# Their results are large only because they grow; other operations have poles.
_GROW = {
    *("exp", "exp2", "expm1", "sinh", "cosh", "mul", "add", "sub", "rsub", "mm", "bmm"),
    *("addmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "vdot", "linear", "addr"),
    *("convolution", "sum", "prod", "cumsum", "cumprod", "square", "norm", "mean"),
    *("linalg_vector_norm", "mse_loss", "softplus", "addcmul", "lerp", "ldexp"),
    *("nansum", "logaddexp", "smooth_l1_loss", "huber_loss", "index_add", "cdist"),
    *("_cdist_forward", "scatter_add", "index_put", "trace", "kron", "celu", "elu"),
    *("gelu", "silu", "hypot", "dist", "poisson_nll_loss", "mkldnn_convolution"),
    *("_foreach_mul", "_foreach_add", "_foreach_exp", "_to_copy", "copy", *_DEGREES),
}
_OVERFLOWS_TO_NAN = {"linalg_matrix_exp"}  # in float64, too
_DIVIDES = {"div", "true_divide", "floor_divide", "remainder", "fmod", "addcdiv"}
_MADE_OF_NUMBERS = (
    "the code makes this tensor of values that torch has not computed, such as NumPy's"
)
_BY_NOTHING = "it divides by a sum that is 0, such as how many elements a mask selects"
_COUNTING = {"nll_loss_forward", "nll_loss2d_forward"}

RANGE, INTERMEDIATE, UNDEFINED = "range", "intermediate", "undefined"
EMPTY, NOT_TRIED = "empty", ""


@dataclass
class Details:
    """Facts about an operation that made a non-finite value.

    Attributes:
        why: RANGE, INTERMEDIATE, UNDEFINED, EMPTY or NOT_TRIED.
        reason: In a sentence.
        inputs: The float tensors that it was given.
        outputs: Those that it returned.
        first_index: Where the first non-finite value is in the first bad one.
        true_value: The result in float64 at the worst place, or None.
        limit: The largest number of the output's dtype.
    """

    why: str = NOT_TRIED
    reason: str = ""
    inputs: list[TensorSummary] = field(default_factory=list)
    outputs: list[TensorSummary] = field(default_factory=list)
    first_index: tuple[int, ...] | None = None
    true_value: float | None = None
    limit: float | None = None

    @property
    def has_bad_inputs(self) -> bool:
        """Tells whether it was given non-finite values, which were meant."""
        return any(each.num_nan or each.num_inf for each in self.inputs)

    @property
    def is_overflow(self) -> bool:
        """Tells whether its true result is a finite number."""
        return self.why in (RANGE, INTERMEDIATE) and self.true_value is not None


def details_of(
    op: Call,
    bad: Sequence[torch.Tensor],
    output: Any,
    counts: Sequence[torch.Tensor],
) -> Details:
    """Looks at an operation that has just run.

    Args:
        op: The operation.
        bad: What it wrote that is non-finite.
        output: What it returned.
        counts: Those of its inputs that count the elements of a mask.
    """
    found = Details()
    before = [op.kept.get(id(tensor), tensor) for tensor in op.read()]
    found.inputs = [summary_of(tensor) for tensor in before]
    found.outputs = [summary_of(tensor) for tensor in bad]
    found.first_index = first_bad(bad[0])
    found.limit = torch.finfo(bad[0].dtype).max
    try:
        _classify(op, found, bad, output, counts)
    except Exception as error:
        text = str(error).splitlines()[:1]
        found.reason = (
            f"it could not be computed again in float64 ({type(error).__name__}: "
            f"{text[0][:80] if text else ''})"
        )
    return found


def _classify(
    op: Call,
    found: Details,
    bad: Sequence[torch.Tensor],
    output: Any,
    counts: Sequence[torch.Tensor],
) -> None:
    why = _of_nothing(op, bad[0], output, counts)
    if why:
        found.why, found.reason = EMPTY, why
        return
    if op.is_constant or (op.numbers and not found.has_bad_inputs):
        found.why, found.reason = UNDEFINED, _MADE_OF_NUMBERS
        if not op.is_constant:
            found.reason = f"the code gives it the number {op.numbers[0]}"
        return
    reference, written = in_float64(op)
    results = [t for t in tensors_in(output) if is_float(t)]
    references = [t for t in tensors_in(reference) if is_float(t)]
    pairs = list(zip(results, references, strict=False))
    true = [wide for own, wide in pairs if own is bad[0]]
    true = [written[id(bad[0])]] if id(bad[0]) in written else true
    if not true or true[0].shape != bad[0].shape:
        found.reason = "its float64 result has another shape"
        return
    _compare(op, found, bad[0], true[0])


def _compare(
    op: Call, found: Details, bad: torch.Tensor, reference: torch.Tensor
) -> None:
    """Takes in what the true result is where the operation's own is not finite."""
    values = reference.detach()[~_wide(bad).isfinite()]
    values = torch.view_as_real(values) if values.is_complex() else values
    assert found.first_index is not None and found.limit is not None
    first = float(reference[found.first_index].real)
    finite = values[values.isfinite()]
    if math.isfinite(first) or (found.has_bad_inputs and finite.numel()):
        found.true_value = float(finite[finite.abs().argmax()])
        is_beyond = abs(found.true_value) > found.limit
        found.why = RANGE if is_beyond else INTERMEDIATE
    elif op.base in _OVERFLOWS_TO_NAN and not found.has_bad_inputs:
        found.why, found.true_value = RANGE, math.inf
    elif (
        math.isinf(first)
        and not found.has_bad_inputs
        and not _is_at_pole(op, found.first_index)
    ):
        found.why = RANGE
        found.true_value = first
    else:
        found.why = UNDEFINED
        found.true_value = first


def _is_at_pole(op: Call, index: tuple[int, ...]) -> bool:
    """Tells whether an infinite result in float64 is that of a pole, such as 1 / 0."""
    base = op.base.removesuffix("_")
    if base in _DIVIDES:
        divisor = op.args[-1]
        return _value_at(divisor, index) in (0.0, None)
    if base == "pow":
        return _value_at(op.args[0], index) in (0.0, None)
    return base not in _GROW


def _value_at(value: Any, index: tuple[int, ...]) -> float | None:
    """The number that an elementwise operation takes from an argument at an index."""
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, torch.Tensor):
        return None
    if value.dim() > len(index):
        return None
    own = index[len(index) - value.dim() :]
    own = tuple(0 if n == 1 else i for i, n in zip(own, value.shape, strict=True))
    return float(value[own]) if not value.is_complex() else None


def _of_nothing(
    op: Call, bad: torch.Tensor, output: Any, counts: Sequence[torch.Tensor]
) -> str:
    """Describes what it reduces, if that is nothing; else ""."""
    base = op.base.rstrip("_")
    read = [t for t in tensors_in(op.args) if t.is_floating_point() or t.is_complex()]
    if base in _COUNTING:
        weight = tensors_in(output)[1]
        return "no label of the batch counts: all are ignored" * bool(weight == 0)
    if any(tensor.numel() == 0 for tensor in read):
        return f"{base} of a tensor without elements"
    if base in _DEGREES and read and read[0].isfinite().all():
        return f"{base} of one element, or none" * _has_one_element(read[0], bad)
    index = first_bad(bad)
    if base in _DIVIDES and index is not None and len(op.args) > 1:
        by, of = op.args[1], op.kept.get(id(op.args[0]), op.args[0])
        is_counted = any(by is count for count in counts)
        if is_counted and _value_at(by, index) == 0 == _value_at(of, index):
            return _BY_NOTHING
    return ""


def _has_one_element(tensor: torch.Tensor, result: torch.Tensor) -> bool:
    return tensor.numel() <= max(1, result.numel())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach()
    return values.float() if values.itemsize == 1 else values
