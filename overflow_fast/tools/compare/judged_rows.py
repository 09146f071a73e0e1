"""Rows of a comparison: how far apart two tensors are, and what rounding explains.

The relative L2 error of n independent roundings to a dtype with epsilon e is
sqrt(0.18 n) e / 2 (see `precision.layers.expected_error`). Only roundings since the two
runs began to differ count: as long as everything was equal bit for bit, they rounded
alike. A difference of `FLAGGED` times that, and of as many times the difference of what
it was computed from, is introduced there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...base.tensors import dtype_named
from ..precision.layers import expected_error
from .matching import Pair, StepTensor
from .summary import Measures, Summary, estimated_all, factors_of, measured
from .tensor_hooks import BACKWARD, STATE, StepPath

EQUAL, ROUNDING, INTRODUCED = "equal", "rounding", "introduced"
PROPAGATED, NOT_COMPARED = "propagated", "not compared"


@dataclass
class TensorDifference:
    """Two tensors that belong together.

    Attributes:
        place: Where the first one was.
        reference_name: The name of the reference's place, if it is another; else "".
        order: Its number in the step.
        step: The step.
        rank: The rank whose it is, or None.
        dtypes: The dtypes of both.
        shapes: The shapes of both.
        ranges: Least and greatest finite value of both; nan where not known.
        num_nan: How many values are nan, of both.
        num_inf: How many are inf.
        measures: How far apart they are; None if they were not compared.
        why: Why they were not compared, or "".
        explained: The relative difference that rounding explains.
        propagated: The relative difference of what it was computed from.
        made: The relative difference that its module alone makes of equal inputs, where
            a float32 shadow has measured it; else None.
        verdict: "equal", "rounding", "introduced", "propagated" or "not compared".
        highlight: The user's own threshold that it exceeds, or "".
        notes: What else there is to know.
        same: The order of an earlier row with the same tensor, or None.
        reference_norm: The L2 norm of the reference; 0 if it is not known.
        factor: The number that the reference was multiplied by, if that is the whole
            difference but for rounding; else None.
        requires_grad: Whether both required gradients; None where that is not known.
    """

    place: StepPath
    reference_name: str
    order: int
    step: int
    rank: int | None
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    ranges: tuple[float, ...]
    num_nan: tuple[int, int]
    num_inf: tuple[int, int]
    measures: Measures | None
    why: str = ""
    explained: float = 0.0
    propagated: float = 0.0
    made: float | None = None
    verdict: str = NOT_COMPARED
    highlight: str = ""
    notes: list[str] = field(default_factory=list)
    same: int | None = None
    reference_norm: float = 0.0
    factor: float | None = None
    requires_grad: tuple[bool | None, bool | None] = (None, None)

    @property
    def name(self) -> str:
        """The place, with its rank if it is one of several."""
        of_rank = "" if self.rank is None else f" (rank {self.rank})"
        return f"{self.place}{of_rank}"

    @property
    def relative(self) -> float:
        """The relative L2 difference; 0 if it is not known."""
        return 0.0 if self.measures is None else self.measures.relative

    @property
    def times(self) -> float | None:
        """The difference as a multiple of what rounding explains; None: not known."""
        if self.measures is None or not self.explained:
            return None
        return self.relative / self.explained

    @property
    def amplification(self) -> float | None:
        """The difference as a multiple of that of what it was computed from."""
        is_known = self.measures is not None and self.propagated > 0
        return self.relative / self.propagated if is_known else None

    def to_dict(self) -> dict[str, Any]:
        """The row as dicts, lists, texts and numbers."""
        measures = self.measures
        plain: dict[str, Any] = {
            "step": self.step,
            "order": self.order,
            "rank": self.rank,
            "name": str(self.place),
            "reference_name": self.reference_name or str(self.place),
            "phase": self.place.phase,
            "module": self.place.module,
            "class": self.place.class_name,
            "call": self.place.call,
            "role": self.place.role,
            "path": self.place.path,
            "dtype": self.dtypes[0],
            "reference_dtype": self.dtypes[1],
            "shape": list(self.shapes[0]),
            "reference_shape": list(self.shapes[1]),
        }
        for name in _MEASURES:
            plain[name] = None if measures is None else getattr(measures, name)
        plain |= {
            "explained": self.explained,
            "times": self.times,
            "propagated": self.propagated,
            "amplification": self.amplification,
            "factor": self.factor,
            "requires_grad": self.requires_grad[0],
            "reference_requires_grad": self.requires_grad[1],
            "made": self.made,
            "verdict": self.verdict,
            "highlight": self.highlight,
            "why": self.why,
            "notes": list(self.notes),
        }
        names = "low", "high", "reference_low", "reference_high"
        plain |= dict(zip(names, self.ranges, strict=True))
        for name, (own, other) in (("nan", self.num_nan), ("inf", self.num_inf)):
            plain |= {f"num_{name}": own, f"reference_num_{name}": other}
        return plain


_MEASURES = (
    *(
        "cosine",
        "cosine_digits",
        "max_abs",
        "max_rel",
        "relative",
        "bits",
        "ulp_median",
        "ulp_p99",
    ),
    *("num_one_sided", "is_exact"),
)


def differences_of(pairs: Sequence[Pair], step: int) -> list[TensorDifference]:
    """Measures pairs, by their values where both were kept."""
    rows = [_row_of(pair, step) for pair in pairs]
    known = [each for each in zip(rows, pairs, strict=True) if not each[0].why]
    estimates = estimated_all([_summaries(pair) for _, pair in known])
    for (row, _), measures in zip(known, estimates, strict=True):
        row.measures = measures
    unequal = [each for each in known if each[0].relative]
    factors = factors_of([_summaries(pair) for _, pair in unequal])
    for (row, pair), found in zip(unequal, factors, strict=True):
        row.measures = _exact(pair.entry, pair.reference) or row.measures
        row.factor = _factor_of(row, *found)
        if row.factor is not None and row.measures and not row.measures.is_exact:
            row.measures = replace(row.measures, relative=abs(row.factor - 1))
    return rows


def _summaries(pair: Pair) -> tuple[Summary, Summary]:
    mine, its = pair.entry.summary, pair.reference.summary
    assert mine is not None and its is not None
    return mine, its


def _row_of(pair: Pair, step: int) -> TensorDifference:
    """The row of a pair, not measured yet; its `why` is set if it cannot be."""
    mine, its = pair.entry, pair.reference
    other = "" if mine.place == its.place else str(its.place)
    row = TensorDifference(
        mine.place,
        "" if other == str(mine.place) else other,
        mine.order,
        step,
        mine.rank if mine.rank is not None else its.rank,
        (mine.dtype, its.dtype),
        (mine.shape, its.shape),
        (*_range(mine), *_range(its)),
        (_count(mine, "num_nan"), _count(its, "num_nan")),
        (_count(mine, "num_inf"), _count(its, "num_inf")),
        None,
        mine.why or its.why,
        same=mine.same,
        reference_norm=0.0 if its.summary is None else its.summary.norm,
        requires_grad=(mine.requires_grad, its.requires_grad),
    )
    is_flat = mine.shape != its.shape
    if is_flat and not row.why and math.prod(mine.shape) != math.prod(its.shape):
        row.why = "the shapes differ"
    if mine.summary is None or its.summary is None:
        row.why = row.why or "it was not recorded"
    if is_flat and not row.why:
        row.notes.append("the shapes differ; compared as flat tensors")
    return row


def _factor_of(row: TensorDifference, factor: float, rest: float) -> float | None:
    if math.prod(row.shapes[1]) < _LEAST_OF_FACTOR:  # a lone number always is one
        return None
    if has_other_counts(row):  # of the finite values alone
        return None
    is_all = rest <= 1e-6 + epsilon(coarser(*row.dtypes))
    return factor if is_all and row.relative > FLAGGED * rest else None


def has_other_counts(row: TensorDifference) -> bool:
    """True if the two do not have the same numbers of nan and of inf."""
    return row.num_nan[0] != row.num_nan[1] or row.num_inf[0] != row.num_inf[1]


_LEAST_OF_FACTOR = 4  # elements
FLAGGED = 8.0  # times what rounding explains


def _exact(mine: StepTensor, its: StepTensor) -> Measures | None:
    values = mine.load()
    reference = None if values is None else its.load()
    if values is None or reference is None:
        return None
    return measured(values, reference, coarser(mine.dtype, its.dtype))


def coarser(*dtypes: str) -> str:
    """Of several dtypes the one with the largest epsilon."""
    return max(dtypes, key=epsilon)


@functools.lru_cache(maxsize=256)
def epsilon(dtype: str) -> float:
    """The epsilon of a dtype; 0 for integers."""
    kind = dtype_named(dtype)
    if kind is None:
        return 0.0
    if kind.is_complex:
        kind = kind.to_real()
    return torch.finfo(kind).eps if kind.is_floating_point else 0.0


def error_of_layer(row: TensorDifference) -> float:
    """The error that roundings of inputs, weights and output of a layer explain."""
    kind = coarser(*row.dtypes)
    return expected_error(getattr(torch, kind), 3) if epsilon(kind) else 0.0


def _range(entry: StepTensor) -> tuple[float, float]:
    summary = entry.summary
    return (math.nan, math.nan) if summary is None else (summary.low, summary.high)


def _count(entry: StepTensor, name: str) -> int:
    return 0 if entry.summary is None else int(getattr(entry.summary, name))


# Of one row: what it was computed from, and what kind of numbers it has.


@dataclass
class ErrorPropagation:
    """The worst of what something was computed from.

    Attributes:
        relative: The largest relative difference.
        variance: The squared relative error of the roundings since there was one.
        width: The longest dimension that may have been summed over.
        norm: The largest norm of a float input.
        terms: How many rows that input has.
    """

    relative: float = 0.0
    variance: float = 0.0
    width: int = 1
    norm: float = 0.0
    terms: int = 1

    def add(self, relative: float, variance: float, width: int = 1) -> None:
        """Adds a tensor that was used."""
        if relative:
            self.relative = max(self.relative, relative)
            self.variance = max(self.variance, variance)
        self.width = max(self.width, width)


def width(row: TensorDifference) -> int:
    """The longest of the last two dimensions."""
    return max(row.shapes[1][-2:], default=1)


def underflow(row: TensorDifference, dtype: str) -> float:
    """The relative error of numbers so small that a dtype has few or no bits for them.

    Each is off by at most half of the smallest subnormal number.
    """
    kind = dtype_named(dtype)
    if kind is None or not kind.is_floating_point or not row.reference_norm:
        return 0.0
    limits = torch.finfo(kind)
    half = limits.smallest_normal * limits.eps / 2
    numel = math.prod(row.shapes[1])
    return half * math.sqrt(numel) / row.reference_norm


def is_odd(row: TensorDifference) -> bool:
    """True if the two do not have the same numbers of nan and inf."""
    one_sided = row.measures is not None and bool(row.measures.num_one_sided)
    return one_sided or has_other_counts(row)


def is_mask(row: TensorDifference) -> bool:
    """True if an input holds the lowest number of a dtype, as masks do."""
    if row.place.role != "input":
        return False
    low, _, reference_low, _ = row.ranges
    return _is_lowest(low, row.dtypes[0]) or _is_lowest(reference_low, row.dtypes[1])


def _is_lowest(value: float, dtype: str) -> bool:
    kind = dtype_named(dtype)
    if kind is None or not kind.is_floating_point:
        return False
    return value <= 0.99 * torch.finfo(kind).min


_PRINT_ERROR = 2e-7  # of fingerprints, which are sums in float32
_LEAF, _CODE = 3, 4  # roundings of a module's inputs, weights and output; of other code
_TF32 = 2.0**-10  # the epsilon
# Chosen, not measured. Behind one ReLU of normally distributed numbers it would be
# sqrt(2 / pi) = 0.8.
_FLIPS = 0.5
_CAST = 3.0  # one cast is off by at most 2.4 times its usual error


class ErrorBounds:
    """Judges the rows of one rank's step, in the order of execution.

    Args:
        has_tf32: Whether a run may have rounded float32 products to TF32.
    """

    def __init__(self, has_tf32: bool) -> None:
        self._has_tf32 = has_tf32
        self._calls: dict[tuple[str, int], ErrorPropagation] = {}
        self._last_call: dict[str, int] = {}
        self._own: dict[
            str, ErrorPropagation
        ] = {}  # parameters and buffers of a module
        self._weights: dict[str, tuple[tuple[int, ...], float]] = {}
        self._known: dict[int, tuple[float, float]] = {}
        self._gradients: dict[str, float] = {}
        self._accumulated: dict[str, tuple[float, float]] = {}  # of parameters
        self._incoming = 0.0  # the norm of the gradient that was last computed
        self._forward, self._backward = ErrorPropagation(), ErrorPropagation()

    def judge(self, row: TensorDifference, pair: Pair) -> None:
        """Judges a row; rows come in the order of execution."""
        place = row.place
        if place.phase == STATE:
            self._judge_state(row, pair)
        elif place.phase == BACKWARD:
            self._judge_gradient(row, pair)
        elif place.role == "input":
            self._judge_input(row, pair)
        else:
            self._judge_output(row, pair)

    def _judge_state(self, row: TensorDifference, pair: Pair) -> None:
        variance = self._of_cast(row)
        self._decide(row, variance, ErrorPropagation(), 1.0, _CAST)
        own = self._own.setdefault(row.place.module, ErrorPropagation())
        own.add(row.relative, variance)
        summary = pair.reference.summary
        if row.place.path == "weight" and summary is not None:
            self._weights[row.place.module] = row.shapes[1], summary.norm

    def _judge_input(self, row: TensorDifference, pair: Pair) -> None:
        place = row.place
        call = self._call_of(row)
        known = self._known.get(-1 if pair.entry.same is None else pair.entry.same)
        if known is not None:
            variance = known[1]
            self._decide(row, variance, ErrorPropagation(known[0]), 1.0)
        elif not place.module:
            variance = self._of_cast(row)
            self._decide(row, variance, ErrorPropagation(), 1.0, _CAST)
        else:
            source = self._latest(place.caller)
            variance = self._after(source, _CODE, row)
            self._decide(row, variance, source, 1.0)
        self._note(row, pair, variance)
        call.add(row.relative, variance, width(row))
        summary = pair.reference.summary
        if summary is not None and epsilon(row.dtypes[1]):
            call.norm = max(call.norm, summary.norm)
            call.terms = max(call.terms, math.prod(row.shapes[1][:-1]))

    def _judge_output(self, row: TensorDifference, pair: Pair) -> None:
        place, call = row.place, self._call_of(row)
        own = self._own.get(place.module, ErrorPropagation())
        call.add(own.relative, own.variance, width(row))
        variance = self._after(call, _LEAF if place.is_leaf else _CODE, row)
        self._decide(row, variance, call, self._cancellation(row, pair, call))
        self._note(row, pair, variance)
        self._latest(place.caller).add(row.relative, variance, width(row))
        self._forward.add(row.relative, variance, width(row))

    def _judge_gradient(self, row: TensorDifference, pair: Pair) -> None:
        place, backward = row.place, self._backward
        before = self._accumulated.get(place.fqn)
        if place.role == "parameter_gradient" and before is not None:
            # Between backward and step at most a factor is rounded: no layer runs.
            source = ErrorPropagation(before[0])
            self._decide(row, before[1] + self._of_code(row), source, 1.0)
            return
        # Where a ReLU's input changes its sign, its whole gradient comes or goes.
        flips = math.sqrt(self._forward.relative) * _FLIPS
        backward.add(flips, self._forward.variance, self._forward.width)
        backward.add(0.0, 0.0, width(row))
        variance = self._after(backward, _LEAF, row)
        summary = pair.reference.summary
        norm = 0.0 if summary is None else summary.norm
        if not place.is_of_call:
            factor = self._sums_to(place.module, row, norm)
            self._decide(row, variance, backward, factor)
            if place.role == "accumulated_gradient":
                relative = math.inf if is_odd(row) else row.relative
                self._accumulated[place.fqn] = relative, row.explained**2
            return
        # What cancels, as behind a softmax, is small beside what it was computed from.
        factor = max(1.0, self._incoming / norm) if norm else math.inf
        self._incoming = norm
        lone = 1 / math.sqrt(max(1, math.prod(row.shapes[1])))  # one sign that changed
        least = lone if self._forward.relative else 0.0
        source = ErrorPropagation(max(backward.relative, least))
        self._decide(row, variance, source, factor)
        self._note(row, pair, variance)
        backward.add(row.relative, variance)
        known = self._gradients.get(place.module, 0.0)
        self._gradients[place.module] = max(known, norm)

    def _sums_to(self, module: str, row: TensorDifference, norm: float) -> float:
        """The factor by which a parameter's gradient is below the terms of its sum.

        The gradient of a key's bias is 0 but for rounding, however large its terms.
        """
        terms = self._gradients.get(module, 0.0)
        call = self._calls.get((module, 0))
        if len(row.shapes[1]) > 1 and call is not None and call.norm:
            terms *= call.norm / math.sqrt(call.terms)
        return max(1.0, terms / norm) if norm else (math.inf if terms else 1.0)

    def _cancellation(
        self, row: TensorDifference, pair: Pair, call: ErrorPropagation
    ) -> float:
        """The factor by which a product is below what random signs would make it."""
        summary = pair.reference.summary
        shape, norm = self._weights.get(row.place.module, ((), 0.0))
        if len(shape) < 2 or not row.place.is_leaf or summary is None or not call.norm:
            return 1.0
        typical = norm * call.norm / math.sqrt(max(shape))
        return max(1.0, typical / summary.norm) if summary.norm else 1.0

    def _after(
        self, source: ErrorPropagation, roundings: int, row: TensorDifference
    ) -> float:
        """The squared error of what came before, and of one more module's roundings.

        Sums are rounded in their own dtype if it is a wide one.
        """
        kind = coarser(*row.dtypes)
        if kind in ("float32", "float64"):
            roundings += max(source.width, width(row))
        before = source.variance if source.relative else 0.0
        return before + self._error(row, kind, roundings) ** 2

    def _of_code(self, row: TensorDifference) -> float:
        """The squared error of a few roundings of code that is no layer."""
        return self._error(row, coarser(*row.dtypes), _CODE) ** 2

    def _of_cast(self, row: TensorDifference) -> float:
        """The squared error of a cast, if there was one."""
        is_cast = row.dtypes[0] != row.dtypes[1]
        return self._error(row, coarser(*row.dtypes), 1) ** 2 if is_cast else 0.0

    def _error(self, row: TensorDifference, dtype: str, roundings: int) -> float:
        """The relative error of independent roundings to a dtype."""
        step = epsilon(dtype)
        error = expected_error(getattr(torch, dtype), roundings) if step else 0.0
        if self._has_tf32 and dtype == "float32":
            error *= _TF32 / epsilon("float32")
        return math.hypot(error, underflow(row, dtype) * math.sqrt(roundings))

    def _decide(
        self,
        row: TensorDifference,
        variance: float,
        source: ErrorPropagation,
        factor: float,
        flagged: float = FLAGGED,
    ) -> None:
        if row.measures is None:
            return
        row.propagated = source.relative
        row.explained = math.sqrt(variance) * factor
        if not row.measures.is_exact:
            row.explained = math.hypot(row.explained, _PRINT_ERROR)
        limit = flagged * max(row.explained, source.relative * factor)
        if not row.relative and not is_odd(row):
            row.verdict = EQUAL
        elif is_mask(row):
            row.notes.append("a mask: the lowest number of its dtype is in it")
            row.verdict = ROUNDING
        elif is_odd(row):
            row.verdict = PROPAGATED if math.isinf(source.relative) else INTRODUCED
        elif row.relative >= limit and limit < math.inf:
            row.verdict = INTRODUCED
        else:
            is_more = row.relative >= FLAGGED * row.explained
            row.verdict = PROPAGATED if is_more else ROUNDING

    def _note(self, row: TensorDifference, pair: Pair, variance: float) -> None:
        relative = math.inf if is_odd(row) else row.relative
        relative = 0.0 if is_mask(row) else relative
        if pair.entry.same is None:
            self._known[pair.entry.order] = relative, variance

    def _call_of(self, row: TensorDifference) -> ErrorPropagation:
        key = row.place.module, row.place.call
        self._last_call[row.place.module] = row.place.call
        return self._calls.setdefault(key, ErrorPropagation())

    def _latest(self, module: str) -> ErrorPropagation:
        return self._calls.setdefault(
            (module, self._last_call.get(module, 0)), ErrorPropagation()
        )


def judge_all(
    rows: Sequence[TensorDifference], pairs: Sequence[Pair], has_tf32: bool
) -> None:
    """Judges rows of any ranks, each rank by itself."""
    bounds: dict[int | None, ErrorBounds] = {}
    for row, pair in zip(rows, pairs, strict=True):
        if row.rank not in bounds:
            bounds[row.rank] = ErrorBounds(has_tf32)
        bounds[row.rank].judge(row, pair)
