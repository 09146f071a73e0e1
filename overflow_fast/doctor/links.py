"""Latency and bandwidth of links, and the speed of each rank, measured twice."""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from .measuring import beyond, ranks_of_links
from .pair_schedule import rounds_of
from .stage import NOTE, WARNING, Finding, Pair, Settings, Site, Stage, capital, named

NAME = "links"
_PASSES = 2
_SMALL = 8  # bytes of a message for the latency
_LARGE = {"cpu": 2**20, "cuda": 2**26}  # and for the bandwidth
_SIDE = {"cpu": 384, "cuda": 8192}  # of a matrix
_FLOOR = 20e-6  # seconds that the host's clock and scheduler may add


@dataclass
class Measured:
    """The measurements of one rank; of a pair, the lower rank measures.

    Attributes:
        host: The name of its host.
        device: "cpu" or "cuda", with the kind of it.
        latency: Seconds of a small message there and back, by the other rank, for each
            pass.
        transfer: The same of a large message.
        product: Seconds of a product of matrices, for each pass.
        num_bytes: The size of a large message.
        cores: How many cores the process may use.
    """

    host: str
    device: str
    num_bytes: int
    cores: int
    latency: list[dict[int, float]] = field(default_factory=list)
    transfer: list[dict[int, float]] = field(default_factory=list)
    product: list[float] = field(default_factory=list)


def _run(site: Site) -> Measured:
    kind = site.device.type
    found = Measured(site.hosts[site.rank], kind, _LARGE[kind], _num_cores())
    rounds = rounds_of(site.members, site.hosts, site.settings.samples)
    for number in range(1, _PASSES + 1):
        site.note(f"the product of matrices (pass {number})")
        found.product.append(_time_product(site))
        latency, transfer = dict[int, float](), dict[int, float]()
        for pairs in rounds:
            other = _other(site.rank, pairs)
            if other is not None:
                site.note(f"messages with rank {other} (pass {number})")
                latency[other] = _time_messages(site, other, _SMALL)
                transfer[other] = _time_messages(site, other, found.num_bytes)
        found.latency.append(_of_lower(site.rank, latency))
        found.transfer.append(_of_lower(site.rank, transfer))
    return found


def _num_cores() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def _other(rank: int, pairs: Sequence[Pair]) -> int | None:
    return next((b if a == rank else a for a, b in pairs if rank in (a, b)), None)


def _of_lower(rank: int, seconds: Mapping[int, float]) -> dict[int, float]:
    return {other: each for other, each in seconds.items() if rank < other}


def _time_messages(site: Site, other: int, num_bytes: int) -> float:
    """Times a message there and back; the first one, uncounted, waits for the other."""
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=site.device)
    to, leads = list(site.members).index(other), site.rank < other

    def there_and_back() -> None:
        for sends in (leads, not leads):
            dist.send(message, to) if sends else dist.recv(message, to)

    return _fastest(there_and_back, site)


def _time_product(site: Site) -> float:
    side = _SIDE[site.device.type]
    dtype = torch.float32 if site.device.type == "cpu" else torch.bfloat16
    matrix = torch.ones(side, side, dtype=dtype, device=site.device)
    result = torch.empty_like(matrix)
    return _fastest(lambda: torch.mm(matrix, matrix, out=result), site)


def _fastest(function: Callable[[], object], site: Site) -> float:
    """The shortest of several times: what else runs only makes some of them longer."""
    seconds = []
    for _ in range(site.settings.repeats + 1):
        begin = time.perf_counter()
        function()
        if site.device.type == "cuda":
            torch.cuda.synchronize(site.device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


# What is out of line.


def _judge(data: Mapping[int, Measured], settings: Settings) -> list[Finding]:
    crowded = _crowded(data)
    if crowded:
        return [Finding(NAME, NOTE, (), crowded)]
    return [
        *_slow_links(data, settings, "latency", "A message there and back"),
        *_slow_links(data, settings, "transfer", "A transfer there and back"),
        *_stragglers(data, settings),
    ]


def _crowded(data: Mapping[int, Measured]) -> str:
    """Returns why times mean nothing where processes wait for each other's cores."""
    if any(each.device != "cpu" for each in data.values()):
        return ""
    for host, count in collections.Counter(each.host for each in data.values()).items():
        cores = min(each.cores for each in data.values() if each.host == host)
        if count > cores:
            return (
                f"The times were not judged: {count} ranks share {cores} cores of "
                f"{host}."
            )
    return ""


def passes_of(data: Mapping[int, Measured], name: str) -> list[dict[Pair, float]]:
    """The seconds of all pairs, for each pass."""
    return [
        {
            (rank, other): seconds
            for rank, each in data.items()
            for other, seconds in getattr(each, name)[number].items()
        }
        for number in range(_PASSES)
    ]


def _slow_links(
    data: Mapping[int, Measured], settings: Settings, name: str, what: str
) -> list[Finding]:
    passes = passes_of(data, name)
    hosts = {rank: each.host for rank, each in data.items()}

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


def _stragglers(data: Mapping[int, Any], settings: Settings) -> list[Finding]:
    passes = [
        {rank: each.product[number] for rank, each in data.items()}
        for number in range(_PASSES)
    ]
    on_gpus = all(each.device == "cuda" for each in data.values())
    factor = settings.straggling if on_gpus else settings.slow
    slow = beyond(passes, lambda rank: data[rank].device, factor)
    hosts = {rank: each.host for rank, each in data.items()}
    return [
        Finding(
            *(NAME, WARNING, (rank,)),
            f"{capital(named([rank], hosts))} straggles: the same product of "
            f"matrices takes {times:.2f} times the median, in both passes.",
        )
        for rank, times in slow.items()
    ]


LINKS = Stage(NAME, _run, _judge)
