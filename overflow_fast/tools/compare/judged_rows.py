"""Rows of a comparison: how far apart two tensors are, and when that is a difference.

The rule:

1. The relative L2 error of n independent roundings to a dtype with epsilon e is
   sqrt(0.18 n) e / 2 (see `precision.layers.expected_error`).
2. Only roundings since the two runs began to differ count: as long as everything was
   equal bit for bit, they rounded alike.
3. A row is introduced where its difference is `FLAGGED` times what its roundings
   explain, and `FLAGGED` times the difference of what it was computed from. What has
   only been cast (weights and batches) is judged from `_CAST` times on.
4. It is propagated where it is that much more than rounding, but what it was computed
   from differs as much; else it is rounding, or equal.
5. What cancels has a larger relative error: both bounds are multiplied by the factor by
   which a result is below the terms that it is summed of.

`ErrorBounds` has the state of one rank's step: the largest difference and the roundings
of each call's inputs, of each module's weights, of the forward and of the backward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...base.tensors import dtype_named
from ..precision.layers import expected_error
from .recorded import RecordedTensor
from .recording_schema import BACKWARD, STATE, RowLine
from .summary import distance, factor_of

EQUAL, ROUNDING, INTRODUCED = "equal", "rounding", "introduced"
PROPAGATED, NOT_COMPARED = "propagated", "not compared"
FLAGGED = 8.0  # times what rounding explains


@dataclass
class TensorDifference:
    """Two tensors that belong together.

    Attributes:
        mine: The tensor of the first run.
        its: That of the reference.
        step: The step.
        why: Why they were not compared, or "".
        relative: The relative L2 difference; 0 if it is not known.
        explained: The relative difference that rounding explains.
        propagated: The relative difference of what it was computed from.
        verdict: "equal", "rounding", "introduced", "propagated" or "not compared".
        notes: What else there is to know.
        factor: The number that the reference was multiplied by, if that is the whole
            difference but for rounding; else None.
    """

    mine: RecordedTensor
    its: RecordedTensor
    step: int
    why: str = ""
    relative: float = 0.0
    explained: float = 0.0
    propagated: float = 0.0
    verdict: str = NOT_COMPARED
    notes: list[str] = field(default_factory=list)
    factor: float | None = None

    @property
    def place(self) -> RowLine:
        """Where the first one was."""
        return self.mine.line

    @property
    def rank(self) -> int | None:
        """The rank whose it is, or None."""
        return self.mine.rank

    @property
    def dtypes(self) -> tuple[str, str]:
        """The dtypes of both."""
        return self.mine.line.dtype, self.its.line.dtype

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of both."""
        return self.mine.shape, self.its.shape

    @property
    def name(self) -> str:
        """The place, with its rank if it is one of several."""
        of_rank = "" if self.rank is None else f" (rank {self.rank})"
        return f"{self.place}{of_rank}"

    @property
    def times(self) -> float | None:
        """The difference as a multiple of what rounding explains; None: not known."""
        if self.why or not self.explained:
            return None
        return self.relative / self.explained

    def numbers(self, name: str) -> tuple[Any, Any]:
        """A number of both summaries, such as "num_nan"; None where not known."""
        sides = self.mine, self.its
        mine, its = (getattr(e.line, name) if e.is_known else None for e in sides)
        return mine, its

    @property
    def has_other_shape(self) -> bool:
        """True if the two were not compared for their shapes."""
        return bool(self.why) and self.shapes[0] != self.shapes[1]

    @property
    def has_other_counts(self) -> bool:
        """True if the two do not have the same numbers of nan and of inf."""
        counts = map(self.numbers, ("num_nan", "num_inf"))
        return any(mine != its for mine, its in counts)

    def to_dict(self) -> dict[str, Any]:
        """The row as dicts, lists, texts and numbers."""
        place = self.place
        plain: dict[str, Any] = {
            "verdict": self.verdict,
            "name": str(place),
            "reference_name": str(self.its.line),
            "step": self.step,
            "order": place.order,
            "rank": self.rank,
            "phase": place.phase,
            "module": place.module,
            "class": place.class_name,
            "call": place.call,
            "role": place.role,
            "path": place.path,
        }
        for name in ("dtype", "shape", "requires_grad"):
            both = self.mine.line, self.its.line
            plain[name], plain[f"reference_{name}"] = (getattr(x, name) for x in both)
        plain["relative"] = None if self.why else self.relative
        for name in ("explained", "times", "propagated", "factor"):
            plain[name] = getattr(self, name)
        for name in ("low", "high", "num_nan", "num_inf"):
            plain[name], plain[f"reference_{name}"] = self.numbers(name)
        return {**plain, "why": self.why, "notes": self.notes}


_LEAST_OF_FACTOR = 4  # elements; chosen


def difference_of(
    mine: RecordedTensor, its: RecordedTensor, step: int
) -> TensorDifference:
    """Measures two tensors by their fingerprints."""
    row = TensorDifference(mine, its, step, why=mine.line.why or its.line.why)
    if math.prod(mine.shape) != math.prod(its.shape):
        row.why = row.why or "the shapes differ"
    if not (mine.is_known and its.is_known):
        row.why = row.why or "it was not recorded"
    if row.why:
        return row
    if mine.shape != its.shape:
        row.notes.append("the shapes differ; compared as flat tensors")
    row.relative = distance(mine.line, its.line)
    if row.relative:
        factor, rest = factor_of(mine.line, its.line)
        if _is_multiple(row, rest):
            row.factor, row.relative = factor, abs(factor - 1)
    return row


def _is_multiple(row: TensorDifference, rest: float) -> bool:
    is_long = math.prod(row.shapes[1]) >= _LEAST_OF_FACTOR  # few numbers always are one
    if not is_long or row.has_other_counts:
        return False
    is_all = rest <= 1e-6 + epsilon(coarser(*row.dtypes))
    return is_all and row.relative > FLAGGED * rest


def coarser(*dtypes: str) -> str:
    """Of several dtypes the one with the largest epsilon."""
    return max(dtypes, key=epsilon)


@functools.lru_cache(maxsize=256)
def _limits(dtype: str) -> torch.finfo | None:
    kind = dtype_named(dtype)
    if kind is None or not (kind.is_floating_point or kind.is_complex):
        return None
    return torch.finfo(kind.to_real() if kind.is_complex else kind)


def epsilon(dtype: str) -> float:
    """The epsilon of a dtype; 0 for integers."""
    limits = _limits(dtype)
    return 0.0 if limits is None else limits.eps


def _is_mask(row: TensorDifference) -> bool:
    """True if an input holds the lowest number of a dtype, as masks do."""
    if row.place.role != "input":
        return False
    for low, dtype in zip(row.numbers("low"), row.dtypes, strict=True):
        limits = _limits(dtype)
        if low is not None and limits is not None and low <= 0.99 * limits.min:
            return True
    return False


_PRINT_ERROR = 2e-7  # of fingerprints, which are sums in float32
_LEAF, _CODE = 3, 4  # roundings of a module's inputs, weights and output; of other code
_TF32 = 2.0**-10  # the epsilon
# Chosen, not measured. Behind one ReLU of normally distributed numbers it would be
# sqrt(2 / pi) = 0.8.
_FLIPS = 0.5
_CAST = 3.0  # one cast is off by at most 2.4 times its usual error


@dataclass
class _Source:
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


class ErrorBounds:
    """Judges the rows of one rank's step, in the order of execution.

    Args:
        has_tf32: Whether a run may have rounded float32 products to TF32.
    """

    def __init__(self, has_tf32: bool) -> None:
        self._has_tf32 = has_tf32
        self._calls: dict[tuple[str, int], _Source] = {}
        self._last_call: dict[str, int] = {}
        self._own: dict[str, _Source] = {}  # parameters and buffers of a module
        self._weights: dict[str, tuple[tuple[int, ...], float]] = {}
        self._known: dict[int, tuple[float, float]] = {}  # by order: relative, variance
        self._gradients: dict[str, float] = {}  # the largest norm within a module
        self._accumulated: dict[str, tuple[float, float]] = {}  # of parameters
        self._incoming = 0.0  # the norm of the gradient that was last computed
        self._forward, self._backward = _Source(), _Source()

    def judge(self, row: TensorDifference) -> None:
        """Judges a row; rows come in the order of execution."""
        place = row.place
        if place.phase == STATE:
            self._judge_state(row)
        elif place.role == "input":
            self._judge_input(row)
        elif place.phase != BACKWARD:
            self._judge_output(row)
        elif place.is_of_call:
            self._judge_gradient(row)
        else:
            self._judge_parameters_gradient(row)

    def _judge_state(self, row: TensorDifference) -> None:
        variance = self._of_cast(row)
        self._decide(row, variance, _Source(), 1.0, _CAST)
        own = self._own.setdefault(row.place.module, _Source())
        own.add(row.relative, variance)
        if row.place.path == "weight":
            self._weights[row.place.module] = row.shapes[1], _norm(row)

    def _judge_input(self, row: TensorDifference) -> None:
        place, call = row.place, self._call_of(row)
        same = row.mine.line.same
        known = None if same is None else self._known.get(same)
        if known is not None:
            variance = known[1]
            self._decide(row, variance, _Source(known[0]), 1.0)
        elif not place.module:
            variance = self._of_cast(row)
            self._decide(row, variance, _Source(), 1.0, _CAST)
        else:
            source = self._latest(place.caller)
            variance = self._after(source, _CODE, row)
            self._decide(row, variance, source, 1.0)
        self._note(row, variance)
        call.add(row.relative, variance, _width(row))
        if epsilon(row.dtypes[1]):
            call.norm = max(call.norm, _norm(row))
            call.terms = max(call.terms, math.prod(row.shapes[1][:-1]))

    def _judge_output(self, row: TensorDifference) -> None:
        place, call = row.place, self._call_of(row)
        own = self._own.get(place.module, _Source())
        call.add(own.relative, own.variance, _width(row))
        variance = self._after(call, _LEAF if place.is_leaf else _CODE, row)
        self._decide(row, variance, call, self._cancellation(row, call))
        self._note(row, variance)
        self._latest(place.caller).add(row.relative, variance, _width(row))
        self._forward.add(row.relative, variance, _width(row))

    def _judge_gradient(self, row: TensorDifference) -> None:
        variance = self._of_backward(row)
        # What cancels, as behind a softmax, is small beside what it was computed from.
        norm, module = _norm(row), row.place.module
        factor = max(1.0, self._incoming / norm) if norm else math.inf
        self._incoming = norm
        lone = 1 / math.sqrt(max(1, math.prod(row.shapes[1])))  # one sign that changed
        least = lone if self._forward.relative else 0.0
        source = _Source(max(self._backward.relative, least))
        self._decide(row, variance, source, factor)
        self._note(row, variance)
        self._backward.add(row.relative, variance)
        self._gradients[module] = max(self._gradients.get(module, 0.0), norm)

    def _judge_parameters_gradient(self, row: TensorDifference) -> None:
        fqn = row.place.fqn
        before = self._accumulated.get(fqn)
        if row.place.role == "parameter_gradient" and before is not None:
            # Between backward and step at most a factor is rounded: no layer runs.
            variance = before[1] + self._error(row, coarser(*row.dtypes), _CODE) ** 2
            self._decide(row, variance, _Source(before[0]), 1.0)
            return
        variance = self._of_backward(row)
        self._decide(row, variance, self._backward, self._sums_to(row))
        if row.place.role == "accumulated_gradient":
            relative = math.inf if row.has_other_counts else row.relative
            self._accumulated[fqn] = relative, row.explained**2

    def _of_backward(self, row: TensorDifference) -> float:
        """The squared error of a gradient."""
        # Where a ReLU's input changes its sign, its whole gradient comes or goes.
        flips = math.sqrt(self._forward.relative) * _FLIPS
        self._backward.add(flips, self._forward.variance, self._forward.width)
        self._backward.add(0.0, 0.0, _width(row))
        return self._after(self._backward, _LEAF, row)

    def _sums_to(self, row: TensorDifference) -> float:
        """The factor by which a parameter's gradient is below the terms of its sum.

        The gradient of a key's bias is 0 but for rounding, however large its terms.
        """
        module, norm = row.place.module, _norm(row)
        terms = self._gradients.get(module, 0.0)
        call = self._calls.get((module, 0))
        if len(row.shapes[1]) > 1 and call is not None and call.norm:
            terms *= call.norm / math.sqrt(call.terms)
        return max(1.0, terms / norm) if norm else (math.inf if terms else 1.0)

    def _cancellation(self, row: TensorDifference, call: _Source) -> float:
        """The factor by which a product is below what random signs would make it."""
        shape, weight = self._weights.get(row.place.module, ((), 0.0))
        norm = _norm(row)
        if len(shape) < 2 or not row.place.is_leaf or not norm or not call.norm:
            return 1.0
        return max(1.0, weight * call.norm / math.sqrt(max(shape)) / norm)

    def _after(self, source: _Source, roundings: int, row: TensorDifference) -> float:
        """The squared error of what came before, and of one more module's roundings.

        Sums are rounded in their own dtype if it is a wide one.
        """
        kind = coarser(*row.dtypes)
        if kind in ("float32", "float64"):
            roundings += max(source.width, _width(row))
        before = source.variance if source.relative else 0.0
        return before + self._error(row, kind, roundings) ** 2

    def _of_cast(self, row: TensorDifference) -> float:
        """The squared error of a cast, if there was one."""
        is_cast = row.dtypes[0] != row.dtypes[1]
        return self._error(row, coarser(*row.dtypes), 1) ** 2 if is_cast else 0.0

    def _error(self, row: TensorDifference, dtype: str, roundings: int) -> float:
        """The relative error of independent roundings to a dtype.

        Each number that is subnormal is off by half of the smallest of them.
        """
        limits = _limits(dtype)
        if limits is None:
            return 0.0
        error = expected_error(getattr(torch, dtype), roundings)
        if self._has_tf32 and dtype == "float32":
            error *= _TF32 / limits.eps
        least = limits.smallest_normal * limits.eps / 2
        norm, numel = _norm(row), math.prod(row.shapes[1])
        lost = least * math.sqrt(numel * roundings) / norm if norm else 0.0
        return math.hypot(error, lost)

    def _decide(
        self,
        row: TensorDifference,
        variance: float,
        source: _Source,
        factor: float,
        flagged: float = FLAGGED,
    ) -> None:
        if row.why:
            return
        row.propagated = source.relative
        row.explained = math.hypot(math.sqrt(variance) * factor, _PRINT_ERROR)
        limit = flagged * max(row.explained, source.relative * factor)
        if not row.relative and not row.has_other_counts:
            row.verdict = EQUAL
        elif _is_mask(row):
            row.notes.append("a mask: the lowest number of its dtype is in it")
            row.verdict = ROUNDING
        elif row.has_other_counts:
            row.verdict = PROPAGATED if math.isinf(source.relative) else INTRODUCED
        elif row.relative >= limit and limit < math.inf:
            row.verdict = INTRODUCED
        else:
            is_more = row.relative >= FLAGGED * row.explained
            row.verdict = PROPAGATED if is_more else ROUNDING

    def _note(self, row: TensorDifference, variance: float) -> None:
        relative = math.inf if row.has_other_counts else row.relative
        relative = 0.0 if _is_mask(row) else relative
        if row.mine.line.same is None:
            self._known[row.place.order] = relative, variance

    def _call_of(self, row: TensorDifference) -> _Source:
        self._last_call[row.place.module] = row.place.call
        return self._latest(row.place.module)

    def _latest(self, module: str) -> _Source:
        key = module, self._last_call.get(module, 0)
        return self._calls.setdefault(key, _Source())


def _norm(row: TensorDifference) -> float:
    """The L2 norm of the reference; 0 if it is not known."""
    return row.its.line.norm


def _width(row: TensorDifference) -> int:
    """The longest of the last two dimensions."""
    return max(row.shapes[1][-2:], default=1)


def judge_all(rows: Sequence[TensorDifference], has_tf32: bool) -> None:
    """Judges rows of any ranks, each rank by itself."""
    bounds: dict[int | None, ErrorBounds] = {}
    for row in rows:
        bounds.setdefault(row.rank, ErrorBounds(has_tf32)).judge(row)
