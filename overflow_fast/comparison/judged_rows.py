"""Rows of a comparison: two tensors, how far apart they are, and why."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..core.tensors import dtype_named
from ..precision.layers import expected_error
from .matching import Pair, StepTensor
from .measures import Measures, estimated_all, factors_of, measured
from .tensor_hooks import StepPath, Summary

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
