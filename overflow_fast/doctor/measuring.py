"""Finds what is out of line among measured numbers. Pure functions."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from .stage import Pair

_Key = TypeVar("_Key", bound=Hashable)
_FEWEST = 3  # of a kind, for a median to say something


def beyond(
    passes: Sequence[Mapping[_Key, float]],
    kind_of: Callable[[_Key], Hashable],
    factor: float,
    floor: float = 0.0,
) -> dict[_Key, float]:
    """Finds what takes longer than others of its kind, in every pass.

    Args:
        passes: Seconds by key, of each pass.
        kind_of: Returns the kind of a key; medians are of one kind.
        factor: The multiple of the median that is too long.
        floor: The seconds beyond the median that are always allowed.

    Returns:
        The least multiple of the median in all passes, for each key that was beyond it
        in all.
    """
    found: dict[_Key, float] | None = None
    for measured in passes:
        groups = collections.defaultdict[Hashable, list[float]](list)
        for key, seconds in measured.items():
            groups[kind_of(key)].append(seconds)
        medians = {kind: statistics.median(each) for kind, each in groups.items()}
        slow = {}
        for key, seconds in measured.items():
            kind = kind_of(key)
            median = medians[kind]
            is_beyond = seconds > max(factor * median, median + floor)
            if len(groups[kind]) >= _FEWEST and is_beyond:
                slow[key] = seconds / median
        before = slow if found is None else found
        found = {key: min(slow[key], before[key]) for key in slow if key in before}
    return found or {}


def ranks_of_links(
    slow: Mapping[Pair, float], measured: Sequence[Pair]
) -> tuple[list[int], list[Pair]]:
    """Splits slow links into ranks most of whose links are slow, and single links.

    Args:
        slow: The slow pairs.
        measured: All measured pairs.

    Returns:
        The ranks, and the pairs without one of them.
    """
    of_rank = collections.Counter(rank for pair in measured for rank in pair)
    left, ranks = set(slow), list[int]()
    while left:
        counts = collections.Counter(rank for pair in left for rank in pair)
        rank, count = max(counts.items(), key=lambda each: (each[1], -each[0]))
        if count < 2 or 2 * count <= of_rank[rank]:
            break
        ranks.append(rank)
        left = {pair for pair in left if rank not in pair}
    return sorted(ranks), sorted(left)


def late_ranks(waited: Mapping[int, float], late: float) -> dict[int, float]:
    """Finds the ranks that came last, by how long each has waited for all others.

    No clocks are compared: a rank that comes late has waited less.

    Args:
        waited: The seconds that each rank has waited.
        late: The seconds after the median that are allowed.

    Returns:
        The seconds after the median, by rank.
    """
    if len(waited) < 2:
        return {}
    middle = statistics.median_high(waited.values())
    return {r: middle - each for r, each in waited.items() if middle - each > late}


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


def culprits(
    wrong: set[Pair], tested: set[Pair]
) -> tuple[list[int], list[int], list[Pair]]:
    """Explains wrong results by the ranks that contributed or received wrongly.

    Args:
        wrong: Pairs of the rank that contributed a value and the one that received it
            wrongly.
        tested: All pairs whose value was compared.

    Returns:
        The ranks that contributed wrongly to most others, those that received wrongly
        from most others, and the pairs that neither explains.
    """
    roles: tuple[list[int], list[int]] = ([], [])
    of_rank = [collections.Counter(pair[role] for pair in tested) for role in (0, 1)]
    left = set(wrong)
    while left:
        counts = [
            (count, -role, rank)
            for role in (0, 1)
            for rank, count in collections.Counter(p[role] for p in left).items()
            if count >= 2 and 2 * count > of_rank[role][rank]
        ]
        if not counts:
            break
        _, role, rank = max(counts)
        roles[-role].append(rank)
        left = {pair for pair in left if pair[-role] != rank}
    return sorted(roles[0]), sorted(roles[1]), sorted(left)
