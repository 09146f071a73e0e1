"""The time that a guard takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """The time that the guard itself took, by the host's clock.

    Attributes:
        step_seconds: The time from the judgement before to this one.
        guard_seconds: The part of it that was spent in the guard: its hooks, scans on
            the CPU, launches, waits and judgement. Not the time of kernels on a device,
            nor what torch takes to call hooks.
        share: The guard's share of all watched steps so far.
    """

    step_seconds: float = 0.0
    guard_seconds: float = 0.0
    share: float = 0.0
