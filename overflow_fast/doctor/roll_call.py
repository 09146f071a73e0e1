"""The roll call: what ranks say of themselves, and what does not fit. Pure."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence

from .facts import Facts, facts_of
from .measuring import late_ranks, odd_ones
from .stage import BROKEN, WARNING, Finding, Settings, Site, Stage, capital, named

NAME = "roll call"
_MOST_TAKEN = 0.1  # of a GPU's memory, before a run begins


def _run(site: Site) -> Facts:
    return facts_of(site.device, site.settings.backend)


def missing(absent: Sequence[int], world: int, limit: float) -> list[Finding]:
    """Names the ranks that did not come within the limit."""
    if not absent:
        return []
    text = (
        f"{capital(named(absent, {}))} of {world} did not come within {limit:g} s: "
        "look for their processes and hosts, and whether these reach the store at "
        "MASTER_ADDR and MASTER_PORT."
    )
    return [Finding(NAME, BROKEN, tuple(absent), text)]


def judge(facts: Mapping[int, Facts], settings: Settings) -> list[Finding]:
    """Finds what does not fit among the facts of ranks."""
    hosts = {rank: each.host for rank, each in facts.items()}
    return [
        *_versions(facts, hosts),
        *_doubles(facts, hosts),
        *_devices(facts, hosts),
        *_late(facts, settings, hosts),
    ]


def _versions(
    facts: Mapping[int, Facts], hosts: Mapping[int, str]
) -> Iterator[Finding]:
    names = {name for each in facts.values() for name in each.versions}
    drivers = {rank: each.smi.get("driver") for rank, each in facts.items()}
    columns: dict[str, Mapping[int, object]] = {
        name: {rank: each.versions.get(name) for rank, each in facts.items()}
        for name in sorted(names)
    }
    columns["GPU driver"] = drivers
    columns["backend"] = {rank: each.backend for rank, each in facts.items()}
    for name, values in columns.items():
        odd = odd_ones(values)
        if odd is None:
            continue
        severity = WARNING if name in ("GPU driver", "Python") else BROKEN
        yield Finding(NAME, severity, tuple(odd[1]), _odd(name, values, odd, hosts))


def _odd(
    name: str,
    values: Mapping[int, object],
    odd: tuple[object, list[int]],
    hosts: Mapping[int, str],
) -> str:
    most, ranks = odd
    if most is None:
        counts = collections.Counter(values.values())
        shown = ", ".join(f"{value} ({n} ranks)" for value, n in counts.most_common(4))
        return f"The ranks differ in {name}: {shown}."
    theirs = ", ".join(sorted({str(values[rank]) for rank in ranks}))
    return f"{name} is {theirs} on {named(ranks, hosts)}, and {most} on the others."


def _doubles(facts: Mapping[int, Facts], hosts: Mapping[int, str]) -> Iterator[Finding]:
    """Ranks that share a GPU, or the number on their host."""
    owners = collections.defaultdict[tuple[str, str], list[int]](list)
    for rank, each in facts.items():
        if each.gpu:
            owners[f"GPU {each.gpu}", each.host].append(rank)
        elif each.local_rank is not None:
            owners[f"LOCAL_RANK {each.local_rank}", each.host].append(rank)
    for (what, host), ranks in owners.items():
        if len(ranks) > 1:
            text = (
                f"Ranks {', '.join(map(str, ranks))} have the same {what} on {host}: "
                "each needs its own."
            )
            yield Finding(NAME, BROKEN, tuple(ranks), text)


def _devices(facts: Mapping[int, Facts], hosts: Mapping[int, str]) -> Iterator[Finding]:
    for rank, each in facts.items():
        who, number = capital(named([rank], hosts)), each.local_rank
        for severity, text in (
            (BROKEN, _wrong_device(each, number)),
            (WARNING, _memory(each)),
            (BROKEN, _ecc(each)),
            (WARNING, _slowdown(each)),
        ):
            if text:
                yield Finding(NAME, severity, (rank,), f"{who}: {text}.")


def _wrong_device(facts: Facts, number: int | None) -> str:
    if not facts.num_gpus or number is None or number < facts.num_gpus:
        return ""
    return (
        f"LOCAL_RANK is {number}, and it sees {facts.num_gpus} GPUs "
        "(CUDA_VISIBLE_DEVICES)"
    )


def _memory(facts: Facts) -> str:
    if facts.taken <= _MOST_TAKEN:
        return ""
    return f"{facts.taken:.0%} of the GPU's memory is taken already"


def _ecc(facts: Facts) -> str:
    errors = facts.smi.get("ecc_errors", "0")
    if errors in ("0", "N/A"):
        return ""
    return f"the GPU has {errors} uncorrected ECC errors"


def _slowdown(facts: Facts) -> str:
    if facts.smi.get("hw_slowdown") != "Active":
        return ""
    clock, most = facts.smi.get("clock_mhz", "?"), facts.smi.get("max_clock_mhz", "?")
    return f"the GPU slows down for heat or power (clock {clock} of {most} MHz)"


def _late(
    facts: Mapping[int, Facts], settings: Settings, hosts: Mapping[int, str]
) -> Iterator[Finding]:
    waited = {rank: each.waited for rank, each in facts.items()}
    for rank, seconds in late_ranks(waited, settings.late).items():
        text = (
            f"{capital(named([rank], hosts))} came {seconds:.0f} s after half of "
            "the ranks."
        )
        yield Finding(NAME, WARNING, (rank,), text)


ROLL_CALL = Stage(NAME, _run, judge, needs_group=False)
