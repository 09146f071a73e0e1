"""The rounds in which pairs of ranks measure their links. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from .stage import Pair

_SEED = 20


def rounds_of(
    members: Sequence[int], hosts: Mapping[int, str], samples: int
) -> list[list[Pair]]:
    """Plans the rounds; in each of them a rank is in one pair at most.

    Within each host every rank meets every other. Between hosts ranks of the same
    place meet along the edges of a hypercube, then random ones do.

    Args:
        members: The ranks.
        hosts: The names of their hosts.
        samples: The number of rounds of random pairs.
    """
    nodes: dict[str, list[int]] = {}
    for rank in members:
        nodes.setdefault(hosts[rank], []).append(rank)
    groups = list(nodes.values())
    return [
        each
        for each in (*_within(groups), *_hypercube(groups), *_random(groups, samples))
        if each
    ]


def _within(groups: Sequence[Sequence[int]]) -> list[list[Pair]]:
    tournaments = [_tournament(group) for group in groups]
    longest = max(map(len, tournaments))
    return [
        [pair for each in tournaments if i < len(each) for pair in each[i]]
        for i in range(longest)
    ]


def _tournament(ranks: Sequence[int]) -> list[list[Pair]]:
    """Every rank meets every other, by the circle method."""
    circle: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([_pair(a, b) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def _hypercube(groups: Sequence[Sequence[int]]) -> list[list[Pair]]:
    found, distance = [], 1
    while distance < len(groups):
        meeting = [(a, a ^ distance) for a in range(len(groups))]
        found.append(
            [
                _pair(first, second)
                for a, b in meeting
                if a < b < len(groups)
                for first, second in zip(groups[a], groups[b], strict=False)
            ]
        )
        distance *= 2
    return found


def _random(groups: Sequence[Sequence[int]], samples: int) -> list[list[Pair]]:
    if len(groups) < 2:
        return []
    chance, found = random.Random(_SEED), []
    ranks = [(node, rank) for node, group in enumerate(groups) for rank in group]
    for _ in range(samples):
        chance.shuffle(ranks)
        found.append(
            [
                _pair(a, b)
                for (node, a), (other, b) in zip(ranks[::2], ranks[1::2], strict=False)
                if node != other
            ]
        )
    return found


def _pair(a: int, b: int) -> Pair:
    return min(a, b), max(a, b)
