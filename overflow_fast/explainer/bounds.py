"""The bounds of two questions: is it far larger than usual, is it the same but rounded.

None of the factors follows from a definition: each was chosen. So each row says what
happens if it is wrong. What is tried on the step afterwards decides about most of them:
there a bound that is too low costs a replay, and one that is too high leaves it out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch


class Bound(NamedTuple):
    """How many times as large as usual something is that is out of bounds.

    Attributes:
        factor: So many times.
        least: What is usually smaller counts as this large.
    """

    factor: float
    least: float = 0.0

    def is_passed(self, now: float, usual: float) -> bool:
        """True if something is out of bounds; never where 0 is usual.

        Args:
            now: Its magnitude.
            usual: Its largest one before, or that of the others.
        """
        return now > self.factor * max(usual, self.least) > 0


# A weight, by its last steps: too low costs a replay with smaller weights, too high
# leaves a divergence without its name. Weights below 1 are never too large.
WEIGHT = Bound(10.0, 0.1)
# A weight that is scaled back then: too low scales what has not grown, and too high
# leaves some of what has.
SCALED_BACK = Bound(2.0)
# An update, in learning rates, that Adam's betas leave without bound: too low blames
# betas of what a usual update did.
UPDATE = Bound(10.0)
# One by the largest that they allow: too low takes rounding and weight decay for more.
ROUNDED_UPDATE = Bound(2.0)
# A batch, by the last one and samples of those before: too low tells of a batch that is
# not at fault.
WHOLE_BATCH = Bound(10.0)
# A dimension of a batch, by that of all clean steps: too low tells of a usual length.
LONGER = Bound(1.5)
# A weight that is larger at once, and the loss or gradients from each step to the next:
# too low tells of what an update did, or of noise.
WEIGHT_AT_ONCE = Bound(10.0, 0.1)
TREND = Bound(3.0)
# A small weight since the guard began, that has grown and that has vanished: too low
# tells of a usual training. The operation that failed depends on it in any case.
GROWN = Bound(10.0, 1.0)
VANISHED = Bound(100.0)
# A sample beside the others: too low names a large sample that is like the rest, which
# costs a trial, and too high leaves the remedy of clamping it out.
OUTLIER = Bound(100.0)
# A number that programs write for a missing value, and any other number, both beside
# the rest, where a 1 among zeros is a label. Too low takes data for a placeholder: the
# sentence is wrong then, and a trial is made with 0 in its place.
PLACEHOLDER = Bound(100.0, 1.0)
ODD_NUMBER = Bound(1e6, 1.0)
# Results up to an overflow: in all, and where that alone explains it. Of the latter too
# low takes the scale of a loss for a growth by depth. In benchmarks/answers they grow
# by 7,900 or more.
GROWING = Bound(10.0)
EXPLODING = Bound(1e3)
# The result of one operation, by what it was given: too low names one before an
# overflow whose numbers are usual there, and too high leaves it out.
LEAP = Bound(1e3, 1.0)
# The result of a call, by that of the call before it at the same line, where many of
# them make a leap: too low takes any layers for the cause of an overflow behind them.
RISING = Bound(2.0)
# A buffer after the step with a remedy: too low doubts a remedy that is sound.
BUFFER = Bound(1e3, 1.0)
# The loss and the gradients with a remedy, by the median of the last steps: too low
# rejects a remedy that is sound, too high recommends one that ends the run in the next
# steps.
LOSS = Bound(1e5, 1.0)
GRADIENT = Bound(1e5)


# Of losses before, by which one that is far beyond them is told: fewer have no range.
_FEW, _WIDER = 4, 0.1


def unusual_range(now: float, before: Sequence[float]) -> tuple[float, float] | None:
    """The range of the last losses, where one is far beyond it; else None.

    Twice as far as they are from one another, and than a tenth: too low tells of noise.

    Args:
        now: The loss' magnitude.
        before: Those before.
    """
    if len(before) < _FEW:
        return None
    low, high = min(before), max(before)
    most = 2 * max(high - low, _WIDER * high)
    return None if low - most <= now <= high + most else (low, high)


# Two ways to round seldom differ by more: small networks in float16 are 0.05 % off from
# float32, those in bfloat16 0.5 to 1 % (tests/explainer/test_forward_alone.py).
_ROUNDED = 1e-2
_EPS = 2.5  # times the precision of a dtype, where that is more: 2 % in bfloat16


def tolerance(dtypes: Iterable[torch.dtype]) -> float:
    """The relative difference of results that their rounding explains.

    Too small rejects remedies for their own rounding, too large accepts wrong ones.

    Args:
        dtypes: The dtypes that they were computed in.
    """
    eps = [torch.finfo(each).eps for each in dtypes if each.is_floating_point]
    return max(_ROUNDED, _EPS * max(eps, default=0.0))


def is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two results are the same but for rounding, and non-finite alike."""
    if one.shape != other.shape:
        return False
    share = tolerance([one.dtype, other.dtype])
    one, other = one.detach().double(), other.detach().double()
    finite = one[one.isfinite()].abs()
    least = share * float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=share, atol=least, equal_nan=True)


def least_divisor(dtype: torch.dtype) -> float:
    """The magnitude below which the derivative of a quotient by it overflows.

    In float16 that would be 4e-3, which is usual: there it is the least normal number.
    Too small leaves the next steps of a remedy to fail; too large puts it behind others
    that change more.

    Args:
        dtype: Its dtype.
    """
    info = torch.finfo(dtype)
    return info.tiny if dtype is torch.float16 else info.max**-0.5


def norm_of(tensors: Iterable[torch.Tensor]) -> float:
    """The L2 norm of all values of some tensors together."""
    return math.sqrt(sum(float(each.double().square().sum()) for each in tensors))
