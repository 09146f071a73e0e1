"""The distance of two tensors, from their values or from their fingerprints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..core.tensors import dtype_named
from .fingerprint import WIDTH, without_modes
from .tensor_hooks import Summary

_CHUNK = 2**18  # elements that are read at once
_MAX_ULPS = 2**10  # elements whose distances in ULPs are sorted


@dataclass(frozen=True)
class Measures:
    """The difference of a tensor from its reference; None where it is not known.

    Attributes:
        relative: The relative L2 difference, of values that are finite in both.
        cosine: The cosine similarity. Of fingerprints, it has a standard error of
            (1 - cosine^2) / 16, see `cosine_digits`.
        max_abs: The largest absolute difference.
        max_rel: The largest relative difference, each to its own reference value.
        ulp_median: The median distance in units in the last place of the coarser dtype.
        ulp_p99: Its 99th percentile.
        num_one_sided: How many values are finite on one side only; None if not known.
        is_exact: Whether the values themselves were compared.
    """

    relative: float
    cosine: float
    max_abs: float | None = None
    max_rel: float | None = None
    ulp_median: float | None = None
    ulp_p99: float | None = None
    num_one_sided: int | None = None
    is_exact: bool = False

    @property
    def bits(self) -> float:
        """The bits that agree: -log2 of the relative difference; inf if all do."""
        if not self.relative:
            return math.inf
        return -math.log2(self.relative) if math.isfinite(self.relative) else -math.inf

    @property
    def cosine_digits(self) -> int:
        """The number of decimals of the cosine that are known, up to 7."""
        error = 0.0 if self.is_exact else (1 - self.cosine**2) / math.sqrt(WIDTH)
        return 7 if error < 1e-7 else max(1, min(7, math.floor(-math.log10(error))))


def estimated(summary: Summary, reference: Summary) -> Measures:
    """Measures two tensors by their fingerprints, good to about 10 %."""
    return estimated_all([(summary, reference)])[0]


_FEW = 2**12  # pairs of fingerprints that are measured at once: 16 MiB


def estimated_all(pairs: Sequence[tuple[Summary, Summary]]) -> list[Measures]:
    """Measures pairs of tensors; see `estimated()`.

    The cosine is 1 where one fingerprint is a multiple of the other. It estimates that
    of the tensors with a standard error of (1 - cosine^2) / 16: 251 signed sums are 251
    correlated samples. Norms of the tensors have no place in it: their own errors would
    not cancel.
    """
    found = [Measures(0.0, 1.0)] * len(pairs)
    unequal = [i for i, (a, b) in enumerate(pairs) if a.sums is not b.sums]
    for first in range(0, len(unequal), _FEW):
        few = unequal[first : first + _FEW]
        mine, its = _stacked([pairs[i] for i in few])
        lengths, others = mine.norm(dim=1), its.norm(dim=1)
        apart = mine / lengths[:, None] - its / others[:, None]
        for i, is_equal, squares, own, other, angle in zip(
            few,
            (mine == its).all(1).tolist(),
            *((each.tolist()) for each in (_squares_of(mine - its), lengths, others)),
            _squares_of(apart).tolist(),
            strict=True,
        ):
            if is_equal:
                continue
            a, b = pairs[i]
            cosine = 1.0 if own == other else 0.0
            if own and other:
                cosine = max(-1.0, 1 - angle / 2)
            basic = _measures_from_squares(squares, a.squares, b.squares)
            found[i] = Measures(basic.relative, cosine)
    return found


def factors_of(
    pairs: Sequence[tuple[Summary, Summary]],
) -> list[tuple[float, float]]:
    """Finds the numbers by which tensors are multiples of others, if they are.

    Returns:
        Of each pair the number, and the relative difference that it leaves: about 1e-7
        where one is a multiple of the other in float32.
    """
    found = list[tuple[float, float]]()
    for first in range(0, len(pairs), _FEW):
        mine, its = _stacked(pairs[first : first + _FEW])
        squares, products = _squares_of(its), (mine * its).sum(1)
        factors = products / squares
        rests = _squares_of(mine - factors[:, None] * its)
        for square, factor, rest, is_zero in zip(
            *(squares.tolist(), factors.tolist(), rests.tolist()),
            (mine == 0).all(1).tolist(),
            strict=True,
        ):
            if not square:
                found.append((1.0, 0.0) if is_zero else (math.inf, math.inf))
            elif not factor:
                found.append((0.0, 0.0 if is_zero else math.inf))
            else:
                found.append((factor, math.sqrt(rest / square) / abs(factor)))
    return found


def _stacked(
    pairs: Sequence[tuple[Summary, Summary]],
) -> tuple[torch.Tensor, torch.Tensor]:
    mine, its = ([pair[side].sums for pair in pairs] for side in (0, 1))
    return torch.stack(mine), torch.stack(its)


def _squares_of(rows: torch.Tensor) -> torch.Tensor:
    return rows.square().sum(1)


def _measures_from_squares(squares: float, own: float, reference: float) -> Measures:
    if not reference:
        return Measures(math.inf if squares else 0.0, 0.0 if squares else 1.0)
    relative = math.sqrt(squares / reference)
    return Measures(relative, _cosine(squares, own, reference))


def _cosine(squares: float, own: float, reference: float) -> float:
    """The cosine from |a - b|^2, |a|^2 and |b|^2, without cancellation near 1."""
    product = math.sqrt(own * reference)
    if not product:
        return 1.0 if own == reference else 0.0
    apart = squares - (math.sqrt(own) - math.sqrt(reference)) ** 2
    return max(-1.0, min(1.0, 1 - max(0.0, apart) / (2 * product)))


def measured(values: torch.Tensor, reference: torch.Tensor, dtype: str) -> Measures:
    """Measures two tensors of the same shape. Incurs CPU-GPU syncs.

    Args:
        values: The tensor.
        reference: What it is compared with; may be of another dtype.
        dtype: The dtype of which ULPs are those, such as "bfloat16".
    """
    with without_modes():
        return _measured(values, reference, dtype)


def _measured(values: torch.Tensor, reference: torch.Tensor, dtype: str) -> Measures:
    values = values.detach().to(reference.device).reshape(-1)
    reference = reference.detach().reshape(-1)
    if values.dtype == reference.dtype and torch.equal(values, reference):
        return Measures(0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0, True)
    sums = torch.zeros(6, dtype=_float64(reference), device=reference.device)
    for begin in range(0, len(values), _CHUNK):
        mine, its = (t[begin : begin + _CHUNK] for t in (values, reference))
        _add(sums, _wide(mine), _wide(its))
    squares, own, golden, max_abs, max_rel, odd = sums.tolist()
    basic = _measures_from_squares(squares, own, golden)
    median, p99 = _ulps(values, reference, dtype)
    return Measures(
        basic.relative, basic.cosine, max_abs, max_rel, median, p99, int(odd), True
    )


def _add(sums: torch.Tensor, mine: torch.Tensor, its: torch.Tensor) -> None:
    """Adds squares of difference, own and reference; maxima; one-sided values."""
    difference = mine - its
    squares = difference.square().sum()
    if not squares.isfinite():
        is_finite = mine.isfinite() & its.isfinite()
        sums[5] += (mine.isfinite() != its.isfinite()).sum()
        mine, its = (t.double().where(is_finite, 0) for t in (mine, its))
        difference = mine - its
        squares = difference.square().sum()
    sums[:3] += torch.stack([squares, mine.square().sum(), its.square().sum()])
    distance = difference.abs_()
    sums[3] = torch.maximum(sums[3], distance.max().to(sums.dtype))
    relative = distance.div_(its.abs()).nan_to_num_(0.0, posinf=math.inf).max()
    sums[4] = torch.maximum(sums[4], relative.to(sums.dtype))


def _float64(values: torch.Tensor) -> torch.dtype:
    return torch.float32 if values.device.type == "mps" else torch.float64


def _wide(values: torch.Tensor) -> torch.Tensor:
    is_narrow = values.dtype.is_floating_point and values.element_size() <= 4
    return values.float() if is_narrow else values.to(_float64(values))


def _ulps(
    values: torch.Tensor, reference: torch.Tensor, dtype: str
) -> tuple[float | None, float | None]:
    """The median and the 99th percentile of distances in ULPs, of a sample."""
    kind = dtype_named(dtype)
    if kind is None or not kind.is_floating_point or not len(values):
        return None, None
    step = -(-len(values) // _MAX_ULPS)
    mine, its = (t[::step].to(_float64(reference)) for t in (values, reference))
    limits = torch.finfo(kind)
    exponent = its.abs().clamp(min=limits.smallest_normal).log2().floor()
    ulps = (mine - its).abs() / (exponent.exp2() * limits.eps)
    ulps = ulps[ulps.isfinite()]
    if not len(ulps):
        return None, None
    last = len(ulps) - 1
    ordered = ulps.sort().values
    return float(ordered[last // 2]), float(ordered[round(last * 0.99)])
