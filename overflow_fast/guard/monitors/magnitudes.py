"""Monitors of magnitudes: `verdict.headroom.HeadroomTracker` runs all three in one."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..kinds import POSITIVE, SHARE, whole
from ..options import option
from .monitor import Monitor


@dataclass(frozen=True)
class Saturation(Monitor):
    """Values at the largest number of float16 or float8, where casts may cut off.

    They are counted in the step after one in which a value stood there.
    """

    needs_magnitudes = False

    share: float = field(
        default=0.001,
        metadata=option(
            "Log a warning if this share of an output, weight or gradient in float16 "
            "or float8 equals the dtype's largest number.",
            SHARE,
        ),
    )


@dataclass(frozen=True)
class Headroom(Monitor):
    """Outputs, weights and gradients that are close to the end of their dtype.

    Gradients that a GradScaler scales are left out.
    """

    bits: float = field(
        default=1.0,
        metadata=option(
            "Log a warning when a value could double fewer than this many times in its "
            "dtype. 1.0: it exceeds half of the largest number. The warning comes "
            "again each time the remaining headroom has halved.",
            POSITIVE,
            see="guides/observing.md#before-it-overflows",
        ),
    )


@dataclass(frozen=True)
class Underflow(Monitor):
    """Zeros and subnormals, for `headroom()` and `metrics()`.

    Counting takes torch operations and temporaries of each tensor's size.
    """

    every: int = field(
        default=100,
        metadata=option(
            "Count zeros and subnormals in one of this many watched steps.", whole(1)
        ),
    )
