"""Judges differences by what rounding explains, and finds where others begin.

The relative L2 error of n independent roundings to a dtype with epsilon e is
sqrt(0.18 n) e / 2 (see `precision.recast.expected_error`). Only roundings since the two
runs began to differ count: as long as everything was equal bit for bit, they rounded
alike. A difference of `FLAGGED` times that, and of as many times the difference of what
it was computed from, is introduced there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..core.tensors import dtype_named
from ..precision.layers import expected_error
from .judged_rows import (
    EQUAL,
    FLAGGED,
    INTRODUCED,
    PROPAGATED,
    ROUNDING,
    TensorDifference,
    coarser,
    epsilon,
    has_other_counts,
)
from .matching import Pair
from .tensor_hooks import BACKWARD, STATE

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
_FLIPS = 0.5
_CAST = 3.0  # one cast is off by at most 2.4 times its usual error


class Yardstick:
    """Judges the rows of one rank's step, in the order of execution.

    Args:
        has_tf32: Whether a run may have rounded float32 products to TF32.
    """

    def __init__(self, has_tf32: bool = False) -> None:
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
        place, flow = row.place, self._backward
        before = self._accumulated.get(place.fqn)
        if place.role == "parameter_gradient" and before is not None:
            # Between backward and step at most a factor is rounded: no layer runs.
            source = ErrorPropagation(before[0])
            self._decide(row, before[1] + self._of_code(row), source, 1.0)
            return
        # Where a ReLU's input changes its sign, its whole gradient comes or goes.
        flips = math.sqrt(self._forward.relative) * _FLIPS
        flow.add(flips, self._forward.variance, self._forward.width)
        flow.add(0.0, 0.0, width(row))
        variance = self._after(flow, _LEAF, row)
        summary = pair.reference.summary
        norm = 0.0 if summary is None else summary.norm
        if not place.is_of_call:
            factor = self._sums_to(place.module, row, norm)
            self._decide(row, variance, flow, factor)
            if place.role == "accumulated_gradient":
                relative = math.inf if is_odd(row) else row.relative
                self._accumulated[place.fqn] = relative, row.explained**2
            return
        # What cancels, as behind a softmax, is small beside what it was computed from.
        factor = max(1.0, self._incoming / norm) if norm else math.inf
        self._incoming = norm
        lone = 1 / math.sqrt(max(1, math.prod(row.shapes[1])))  # one sign that changed
        least = lone if self._forward.relative else 0.0
        source = ErrorPropagation(max(flow.relative, least))
        self._decide(row, variance, source, factor)
        self._note(row, pair, variance)
        flow.add(row.relative, variance)
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
        self, flow: ErrorPropagation, roundings: int, row: TensorDifference
    ) -> float:
        """The squared error of what came before, and of one more module's roundings.

        Sums are rounded in their own dtype if it is a wide one.
        """
        kind = coarser(*row.dtypes)
        if kind in ("float32", "float64"):
            roundings += max(flow.width, width(row))
        before = flow.variance if flow.relative else 0.0
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
        flow: ErrorPropagation,
        factor: float,
        flagged: float = FLAGGED,
    ) -> None:
        if row.measures is None:
            return
        row.propagated = flow.relative
        row.explained = math.sqrt(variance) * factor
        if not row.measures.is_exact:
            row.explained = math.hypot(row.explained, _PRINT_ERROR)
        limit = flagged * max(row.explained, flow.relative * factor)
        if not row.relative and not is_odd(row):
            row.verdict = EQUAL
        elif is_mask(row):
            row.notes.append("a mask: the lowest number of its dtype is in it")
            row.verdict = ROUNDING
        elif is_odd(row):
            row.verdict = PROPAGATED if math.isinf(flow.relative) else INTRODUCED
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
    yardsticks: dict[int | None, Yardstick] = {}
    for row, pair in zip(rows, pairs, strict=True):
        if row.rank not in yardsticks:
            yardsticks[row.rank] = Yardstick(has_tf32=has_tf32)
        yardsticks[row.rank].judge(row, pair)
