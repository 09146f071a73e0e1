"""Verdicts that a device's own overflow flag leads to."""

from __future__ import annotations

from ..flags import is_label
from .verdict import Verdict

# The words for where it came from.
OF_FLAG = (
    "the device's overflow flag was set, and no tensor that was seen is bad: an "
    "operation overflowed inside"
)


def is_of_flag(verdict: Verdict) -> bool:
    """Returns whether a device's overflow flag was set, and no tensor was bad."""
    first = verdict.first
    return first is not None and first.kind == "recorded" and is_label(first.label)
