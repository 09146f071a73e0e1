"""Latency and bandwidth of links and the speed of ranks, and which are out of line."""

from __future__ import annotations

import collections
import os
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

from ...base.text import capitalized, counted
from .stage import (
    NOTE,
    WARNING,
    ExaminationSettings,
    Finding,
    Pair,
    Stage,
    StageSite,
    hosts_of,
    named,
)

# Finds what is out of line among measured numbers. Pure functions.


_Key = TypeVar("_Key", bound=Hashable)
_FEWEST = 3  # of a kind, for a median to say something


def beyond(
    passes: Sequence[Mapping[_Key, float]],
    kind_of: Callable[[_Key], Hashable],
    factor: float,
    floor: float,
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


# The rounds in which pairs of ranks measure their links. Pure.


_SEED = 20  # any: all ranks draw the same


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


NAME = "links"
_PASSES = 2  # only what is slow in each of them is said to be
_SMALL = 8  # bytes of a message for the latency
_LARGE = {"cpu": 2**20, "cuda": 2**26}  # and for the bandwidth
# Of a matrix; on CPUs a product is over before the scheduler gives the core away.
_SIDE = {"cpu": 192, "cuda": 8192}
_PRODUCTS = {"cpu": 4, "cuda": 1}  # times as many as messages
_FLOOR = 20e-6  # seconds that the host's clock and scheduler may add


@dataclass
class Measured:
    """The measurements of one rank; of a pair, the lower rank measures.

    Attributes:
        host: The name of its host.
        device: "cpu" or "cuda", with the kind of it.
        latency: Seconds of each small message there and back, by the other rank, for
            each pass.
        transfer: The same of large messages.
        product: Seconds of each product of matrices, for each pass.
        num_bytes: The size of a large message.
        cores: How many cores the process may use.
    """

    host: str
    device: str
    num_bytes: int
    cores: int
    latency: list[dict[int, list[float]]] = field(default_factory=list)
    transfer: list[dict[int, list[float]]] = field(default_factory=list)
    product: list[list[float]] = field(default_factory=list)


def _run(site: StageSite) -> Measured:
    kind = site.device.type
    found = Measured(site.hosts[site.rank], kind, _LARGE[kind], _num_cores())
    rounds = rounds_of(site.members, site.hosts, site.settings.samples)
    for number in range(1, _PASSES + 1):
        site.note(f"the product of matrices (pass {number})")
        found.product.append(_time_product(site))
        latency, transfer = dict[int, list[float]](), dict[int, list[float]]()
        for pairs in rounds:
            other = _other(site.rank, pairs)
            if other is not None:
                site.note(f"messages with rank {other} (pass {number})")
                latency[other] = _time_messages(site, other, _SMALL)
                transfer[other] = _time_messages(site, other, found.num_bytes)
        found.latency.append(_measured_by(site.rank, latency))
        found.transfer.append(_measured_by(site.rank, transfer))
    return found


def _num_cores() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def _other(rank: int, pairs: Sequence[Pair]) -> int | None:
    return next((b if a == rank else a for a, b in pairs if rank in (a, b)), None)


def _measured_by(
    rank: int, seconds: Mapping[int, list[float]]
) -> dict[int, list[float]]:
    return {other: each for other, each in seconds.items() if rank < other}


def _time_messages(site: StageSite, other: int, num_bytes: int) -> list[float]:
    """Times messages there and back; the first one, uncounted, waits for the other."""
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=site.device)
    to, leads = list(site.members).index(other), site.rank < other

    def there_and_back() -> None:
        for sends in (leads, not leads):
            dist.send(message, to) if sends else dist.recv(message, to)

    return _times(there_and_back, site, site.settings.repeats)


def _time_product(site: StageSite) -> list[float]:
    side = _SIDE[site.device.type]
    dtype = torch.float32 if site.device.type == "cpu" else torch.bfloat16
    matrix = torch.ones(side, side, dtype=dtype, device=site.device)
    result = torch.empty_like(matrix)
    repeats = _PRODUCTS[site.device.type] * site.settings.repeats
    return _times(lambda: torch.mm(matrix, matrix, out=result), site, repeats)


def _times(
    function: Callable[[], object], site: StageSite, repeats: int
) -> list[float]:
    """The seconds of each repetition but a first one, which warms up."""
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        function()
        if site.device.type == "cuda":
            torch.cuda.synchronize(site.device)
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


# What is out of line.


def _judge(
    data: Mapping[int, Measured], settings: ExaminationSettings
) -> list[Finding]:
    crowded = _crowded(data)
    found = _stragglers(data, settings, bool(crowded))
    if crowded:
        return [*found, Finding(NAME, NOTE, (), crowded)]
    return [
        *_slow_links(data, settings, "latency", "A message there and back"),
        *_slow_links(data, settings, "transfer", "A transfer there and back"),
        *found,
        *_single_links(data),
    ]


def _crowded(data: Mapping[int, Measured]) -> str:
    """Returns why times mean little where processes wait for each other's cores."""
    if any(each.device != "cpu" for each in data.values()):
        return ""
    for host, count in collections.Counter(each.host for each in data.values()).items():
        cores = min(each.cores for each in data.values() if each.host == host)
        if count > cores:
            return (
                f"Times of links were not judged, and of products only those that take "
                f"several times as long as the others': {counted(count, 'rank')} share "
                f"{counted(cores, 'core')} of {host}."
            )
    return ""


def passes_of(data: Mapping[int, Measured], name: str) -> list[dict[Pair, float]]:
    """The seconds of all pairs, for each pass: those of the fastest message.

    What else runs only makes some of them longer.
    """
    return [
        {
            (rank, other): min(seconds)
            for rank, each in data.items()
            for other, seconds in getattr(each, name)[number].items()
        }
        for number in range(_PASSES)
    ]


def _slow_links(
    data: Mapping[int, Measured], settings: ExaminationSettings, name: str, what: str
) -> list[Finding]:
    passes = passes_of(data, name)
    hosts = hosts_of(data)

    def is_within(pair: Pair) -> bool:
        return hosts[pair[0]] == hosts[pair[1]]

    slow = beyond(passes, is_within, settings.slow, _FLOOR)
    ranks, pairs = ranks_of_links(slow, list(passes[0]))
    found = []
    for rank in ranks:
        least = min(factor for pair, factor in slow.items() if rank in pair)
        text = (
            f"{what} takes {named([rank], hosts)} at least {least:.1f} times the median"
            " with most others, in both passes."
        )
        found.append(Finding(NAME, WARNING, (rank,), text))
    for a, b in pairs:
        text = (
            f"{what} between {named([a, b], hosts)} takes {slow[a, b]:.1f} times the "
            "median of such links, in both passes."
        )
        found.append(Finding(NAME, WARNING, (a, b), text))
    return found


def _single_links(data: Mapping[int, Measured]) -> list[Finding]:
    """Notes the links of which there are too few for a median to say something."""
    hosts = hosts_of(data)
    pairs = list(passes_of(data, "latency")[0])
    kinds = collections.Counter(hosts[a] == hosts[b] for a, b in pairs)
    return [
        Finding(
            *(NAME, NOTE, ()),
            f"{counted(count, 'link')} {'within' if is_within else 'between'} hosts "
            f"{'was' if count == 1 else 'were'} not judged: at least {_FEWEST} are "
            "compared with each other.",
        )
        for is_within, count in kinds.items()
        if count < _FEWEST
    ]


def _stragglers(
    data: Mapping[int, Measured], settings: ExaminationSettings, is_crowded: bool
) -> list[Finding]:
    """Compares each rank's products with those of the others of its kind.

    A rank is slow if in each pass even its fastest product takes too long beside what
    is usual for the others. If only most of its own do, its times spread too much to
    say.
    """
    on_gpus = all(each.device == "cuda" for each in data.values())
    factor = settings.straggling if on_gpus else settings.slow
    hosts = hosts_of(data)
    kinds = collections.defaultdict[str, list[int]](list)
    for rank, each in data.items():
        kinds[each.device].append(rank)
    found = list[Finding]()
    alone = [rank for ranks in kinds.values() for rank in ranks if len(ranks) == 1]
    ratios = {r: e for ranks in kinds.values() for r, e in _ratios(data, ranks).items()}
    for rank, of_passes in ratios.items():
        who, has_one = named([rank], hosts), len(kinds[data[rank].device]) == 2
        least = min(fastest for fastest, _ in of_passes)
        if least > factor:
            whose = "the other rank" if has_one else "the others"
            text = (
                f"{capitalized(who)} straggles: even its fastest product of matrices "
                f"takes {least:.2f} times what is usual for {whose}, in both passes."
            )
            found.append(Finding(NAME, WARNING, (rank,), text))
        elif not is_crowded and min(typical for _, typical in of_passes) > factor:
            text = (
                f"The speed of {who} was not judged: most of its products of matrices "
                "take much longer than the others', and its fastest does not."
            )
            found.append(Finding(NAME, NOTE, (rank,), text))
    if alone:
        text = (
            f"The speed of {named(alone, hosts)} was not judged: no other rank that "
            "was examined has a device of its kind."
        )
        found.append(Finding(NAME, NOTE, (), text))
    return found


def _ratios(
    data: Mapping[int, Measured], ranks: Sequence[int]
) -> dict[int, list[tuple[float, float]]]:
    """Each rank's fastest and median product over what is usual, for each pass.

    Usual is the median of the other ranks' medians.
    """
    found: dict[int, list[tuple[float, float]]] = {r: [] for r in ranks if ranks[1:]}
    for number in range(_PASSES):
        medians = {r: statistics.median(data[r].product[number]) for r in ranks}
        for rank, ratios in found.items():
            usual = statistics.median(medians[r] for r in ranks if r != rank)
            fastest = min(data[rank].product[number])
            ratios.append((fastest / usual, medians[rank] / usual))
    return found


LINKS = Stage(NAME, _run, _judge)
