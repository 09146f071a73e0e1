"""The ranks whose value is another one than that of most."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Mapping


def odd_ones(values: Mapping[int, Hashable]) -> tuple[Hashable, list[int]] | None:
    """Finds the ranks whose value differs from that of most.

    Returns:
        The value of most and the odd ranks, in order; all ranks if there is no
        majority. None if all are the same.
    """
    counts = collections.Counter(values.values())
    if len(counts) < 2:
        return None
    most, count = counts.most_common(1)[0]
    if 2 * count <= len(values):
        return None, sorted(values)
    return most, sorted(rank for rank, value in values.items() if value != most)
