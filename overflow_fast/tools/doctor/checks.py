"""The checks of an examination, a stage each: arithmetic, collectives, agreement."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...base.tensors import digest_of
from ...base.text import capitalized, dtype_name
from ...guard.guard import OverflowGuard
from .roll_call import facts_of, slow_network
from .stage import (
    BROKEN,
    NOTE,
    WARNING,
    ExaminationSettings,
    Finding,
    Pair,
    Stage,
    StageSite,
    hosts_of,
    named,
    odd_ones,
)

ARITHMETIC_NAME = "arithmetic"
_SEED = 20  # any: all devices draw the same
_SIDE = 256
# Factors of products that are exact in the dtype, however they are summed up.
_LARGEST = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 8, torch.float64: 64}


@dataclass(frozen=True)
class Digests:
    """The results of one rank.

    Attributes:
        host: The name of its host.
        kind: The kind of its device: only within one kind all bits must agree.
        wrong: The products whose exact result came out wrong.
        first: Digests of other arithmetic, by its name.
        again: The same, computed once more.
    """

    host: str
    kind: str
    wrong: list[str]
    first: dict[str, int]
    again: dict[str, int]


def _run_arithmetic(site: StageSite) -> Digests:
    site.note("products with known results")
    wrong = [
        dtype_name(dtype) for dtype in _LARGEST if not is_exact(dtype, site.device)
    ]
    site.note("arithmetic")
    first = _digests(site)
    site.note("arithmetic, again")
    kind = facts_of(site.device, site.settings.backend).kind
    return Digests(site.hosts[site.rank], kind, wrong, first, _digests(site))


def is_exact(dtype: torch.dtype, device: torch.device) -> bool:
    """Multiplies matrices of small integers, and compares with integer arithmetic."""
    most = _LARGEST[dtype]
    left, right = _integers(most, 0), _integers(most, 1)
    expected = left @ right
    product = left.to(device, dtype) @ right.to(device, dtype)
    return torch.equal(product.cpu().to(torch.int64), expected)


def _integers(most: int, number: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(_SEED + number)
    return torch.randint(-most, most + 1, (_SIDE, _SIDE), generator=chance)


def _digests(site: StageSite) -> dict[str, int]:
    operations: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "product": lambda x: x @ x.T,
        "exp": torch.exp,
        "softmax": lambda x: torch.softmax(x, -1),
        "sum": lambda x: x.sum(0),
        "sort": lambda x: x.flatten().sort().values,
    }
    # Drawn on the CPU: generators of devices differ between kinds.
    chance = torch.Generator().manual_seed(_SEED)
    values = torch.randn(_SIDE, _SIDE, generator=chance).to(site.device)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for name, operation in operations.items():
            result = operation(values.to(dtype))
            found[f"{name} of {dtype_name(dtype)}"] = int(digest_of(result))
    return found


def _judge_arithmetic(
    data: Mapping[int, Digests], settings: ExaminationSettings
) -> list[Finding]:
    hosts = hosts_of(data)
    found = []
    for rank, each in data.items():
        who = capitalized(named([rank], hosts))
        if each.wrong:
            text = (
                f"{who} computes wrongly: a product of {', '.join(each.wrong)} whose "
                "exact result is known came out different."
            )
            found.append(Finding(ARITHMETIC_NAME, BROKEN, (rank,), text))
        differing = [
            name for name in each.first if each.first[name] != each.again[name]
        ]
        if differing:
            text = f"{who} computed {', '.join(differing)} twice, with different bits."
            found.append(Finding(ARITHMETIC_NAME, BROKEN, (rank,), text))
    return found + _differing(data, hosts, {r for f in found for r in f.ranks})


def _differing(
    data: Mapping[int, Digests], hosts: Mapping[int, str], known: set[int]
) -> list[Finding]:
    """The ranks whose bits differ from those of the others of their kind."""
    kinds = collections.defaultdict[str, dict[int, tuple[tuple[str, int], ...]]](dict)
    for rank, each in data.items():
        if rank not in known:
            kinds[each.kind][rank] = tuple(sorted(each.first.items()))
    found = []
    for kind, of_ranks in kinds.items():
        odd = odd_ones(of_ranks)
        if odd is None:
            continue
        ranks = tuple(odd[1])
        text = (
            f"{capitalized(named(ranks, hosts))} computed other bits than the other "
            f"ranks with {kind}: silent data corruption, or another library."
        )
        if odd[0] is None:
            text = (
                f"The ranks with {kind} computed different bits; there is no majority."
            )
        found.append(Finding(ARITHMETIC_NAME, BROKEN, ranks, text))
    return found


ARITHMETIC = Stage(
    ARITHMETIC_NAME, _run_arithmetic, _judge_arithmetic, needs_group=False
)


# Collectives of values whose result is exact, and who spoils it.


COLLECTIVES_NAME = "collectives"
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.uint8),
)
_WIDTH = 4  # values that a rank contributes: a number, nan, inf, -inf
_MOST_ROOTS = 4  # of broadcasts
_UNSUPPORTED = ("not supported", "unsupported", "invalid scalar type", "not implement")

Wrong = tuple[str, str, int, str]


def values_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Makes what a rank contributes: exact in its dtype, alone or added to zeros."""
    number = 1 + rank % 100
    if dtype.is_floating_point:
        values = [number + 0.5, math.nan, math.inf, -math.inf]
    else:
        values = [number, number + 1, number + 2, number + 3]
    return torch.tensor(values, dtype=dtype)


# Each returns the received values with the rank that contributed each: rows of
# (contributor, expected, received).

Rows = Iterator[tuple[int, torch.Tensor, torch.Tensor]]


def _all_reduce(rank: int, world: int, dtype: torch.dtype, to: torch.device) -> Rows:
    # Only one rank gives each row anything but zeros, so that no sum is rounded.
    rows = torch.zeros(world, _WIDTH, dtype=dtype)
    rows[rank] = values_of(rank, dtype)
    rows = rows.to(to)
    dist.all_reduce(rows)
    return _compared(rows, range(world), dtype)


def _all_gather(rank: int, world: int, dtype: torch.dtype, to: torch.device) -> Rows:
    rows = torch.zeros(world, _WIDTH, dtype=dtype, device=to)
    dist.all_gather(list(rows.unbind()), values_of(rank, dtype).to(to))
    return _compared(rows, range(world), dtype)


def _all_to_all(rank: int, world: int, dtype: torch.dtype, to: torch.device) -> Rows:
    rows = torch.zeros(world, _WIDTH, dtype=dtype, device=to)
    given = values_of(rank, dtype).repeat(world, 1).to(to)
    dist.all_to_all_single(rows, given)
    return _compared(rows, range(world), dtype)


def _reduce_scatter(
    rank: int, world: int, dtype: torch.dtype, to: torch.device
) -> Rows:
    # Value j of the chunk for rank q is contributed by rank q + j alone.
    chunks = torch.zeros(world, _WIDTH, dtype=dtype)
    own = values_of(rank, dtype)
    for j in range(_WIDTH):
        chunks[(rank - j) % world, j] = own[j]
    chunk = torch.zeros(_WIDTH, dtype=dtype, device=to)
    # torch 2.12 and older have it by another name.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(chunk, chunks.flatten().to(to))
    received = chunk.cpu()
    for j in range(_WIDTH):
        contributor = (rank + j) % world
        yield contributor, values_of(contributor, dtype)[j], received[j]


def _broadcast(rank: int, world: int, dtype: torch.dtype, to: torch.device) -> Rows:
    for root in roots_of(world):
        row = values_of(rank, dtype).to(to)
        dist.broadcast(row, root)
        yield root, values_of(root, dtype), row.cpu()


def _compared(rows: torch.Tensor, ranks: range, dtype: torch.dtype) -> Rows:
    received = rows.cpu()
    for rank in ranks:
        yield rank, values_of(rank, dtype), received[rank]


OPERATIONS: dict[str, Callable[[int, int, torch.dtype, torch.device], Rows]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "broadcast": _broadcast,
}


def roots_of(world: int) -> list[int]:
    """Lists the ranks that broadcast."""
    step = max(1, world // _MOST_ROOTS)
    return list(range(0, world, step))[:_MOST_ROOTS]


def compared_pairs(operation: str, world: int) -> set[Pair]:
    """Lists the pairs of contributor and receiver whose values are compared."""
    if operation == "reduce-scatter":
        return {((q + j) % world, q) for q in range(world) for j in range(_WIDTH)}
    contributors = roots_of(world) if operation == "broadcast" else range(world)
    return {(s, q) for s in contributors for q in range(world)}


# Bytes: from a message in one packet to one that is cut up, pipelined and aligned.
SIZES = (8, 64, 512, 2**12, 2**15, 2**18, 2**21, 2**24, 2**26)
_OF_LIMIT = 0.2  # of a stage's time
_UNTIMED = "sizes without time"  # from which on there was none
_PRIME = 97  # no chunk or pipeline has a multiple of it as its length


def _sized(number: int, rank: int) -> torch.Tensor:
    """Whole numbers whose sums over 1,024 ranks are exact in float32."""
    return (torch.arange(number) % _PRIME + rank % 100).float()


def size_text(num_bytes: int) -> str:
    """Writes a power of 2 of bytes: "8 bytes", "512 KiB", "64 MiB"."""
    units = ((2**20, "MiB"), (2**10, "KiB"))
    size, unit = next((each for each in units if num_bytes >= each[0]), (1, "bytes"))
    return f"{num_bytes // size} {unit}"


def _run_sizes(site: StageSite) -> Iterator[Wrong]:
    """All-reduces and broadcasts of all sizes, as far as the time goes."""
    world, begin, last, before = len(site.members), time.monotonic(), 0.0, 0
    go_on = torch.ones(1, device=site.device)
    for num_bytes in SIZES:
        # One rank decides for all: the others' clocks are not its own.
        spent = time.monotonic() - begin
        growth = num_bytes / before if before else 0.0
        is_late = spent + growth * (spent - last) > _OF_LIMIT * site.settings.limit
        last, before = spent, num_bytes
        dist.broadcast(go_on.fill_(not is_late), 0)
        if not bool(go_on):
            yield _UNTIMED, size_text(num_bytes), 0, ""
            return
        number = num_bytes // 4
        for name in ("all-reduce", "broadcast"):
            site.note(f"{name} of {size_text(num_bytes)}")
            own = _sized(number, site.position).to(site.device)
            if name == "all-reduce":
                dist.all_reduce(own)
                expected = torch.arange(number) % _PRIME * world
                expected = (expected + sum(r % 100 for r in range(world))).float()
            else:
                dist.broadcast(own, 0)
                expected = _sized(number, 0)
            if text := _first_wrong(own.cpu(), expected):
                yield name, f"float32, {size_text(num_bytes)}", 0, text


def _first_wrong(received: torch.Tensor, expected: torch.Tensor) -> str:
    wrong = (received != expected).nonzero().flatten()
    if not len(wrong):
        return ""
    at = int(wrong[0])
    return (
        f"{len(wrong)} of {len(expected)} values, the first {float(received[at]):g} "
        f"instead of {float(expected[at]):g}"
    )


def _run_collectives(site: StageSite) -> tuple[list[Wrong], list[str]]:
    """Runs all; returns the wrong results of this rank, and what cannot be run."""
    wrong, unsupported = list[Wrong](), list[str]()
    world, rank = len(site.members), site.position
    for name, operation in OPERATIONS.items():
        for dtype in DTYPES:
            short = dtype_name(dtype)
            site.note(f"{name} of {short}")
            try:
                rows = list(operation(rank, world, dtype, site.device))
            except (RuntimeError, ValueError, TypeError) as error:
                if not _is_unsupported(error):
                    raise
                unsupported.append(f"{name} of {short}")
                continue
            for contributor, expected, received in rows:
                if text := _difference(expected, received):
                    wrong.append((name, short, contributor, text))
    wrong += _run_sizes(site)
    return wrong, unsupported


def _is_unsupported(error: Exception) -> bool:
    return any(each in str(error).lower() for each in _UNSUPPORTED)


def _difference(expected: torch.Tensor, received: torch.Tensor) -> str:
    """Both in words where they differ, else ""."""
    if torch.equal(_comparable(expected), _comparable(received)):
        return ""
    return f"{received.tolist()} instead of {expected.tolist()}"


def _comparable(values: torch.Tensor) -> torch.Tensor:
    """The values with one bit pattern for nan, of which there are many."""
    if not values.is_floating_point():
        return values
    return torch.stack([values.isnan().double(), values.double().nan_to_num(0.0)])


def _judge_collectives(
    data: Mapping[int, Any], settings: ExaminationSettings
) -> list[Finding]:
    members = sorted(data)
    wrong: dict[str, set[Pair]] = {}
    examples: dict[tuple[str, Pair], str] = {}
    for q, rank in enumerate(members):
        for operation, dtype, contributor, text in data[rank][0]:
            pair = contributor, q
            wrong.setdefault(operation, set()).add(pair)
            examples.setdefault((operation, pair), f"{dtype}: {text}")
    found = list[Finding]()
    for pair in sorted(wrong.pop(_UNTIMED, set()))[:1]:
        size = examples[_UNTIMED, pair].partition(":")[0]
        more = " and more" * (size != size_text(SIZES[-1]))
        share = f"{_OF_LIMIT:.0%} of a stage's {settings.limit:g} seconds"
        text = (
            f"Messages of {size}{more} were not checked: at the speed of smaller "
            f"ones they would not fit into {share}."
        )
        found.append(Finding(COLLECTIVES_NAME, NOTE, (), text))
    for operation, pairs in wrong.items():
        if operation in _REDUCING:
            found += _explained_sum(operation, pairs, members, examples)
        else:
            found += _explained(operation, pairs, members, examples)
    return found


_REDUCING = ("all-reduce", "reduce-scatter")


def _explained_sum(
    operation: str,
    wrong: set[Pair],
    members: list[int],
    examples: Mapping[tuple[str, Pair], str],
) -> Iterator[Finding]:
    """Explains sums: each rank gives to all of them, so a wrong one shows no giver.

    A taker is known where others got the same sum right.
    """
    takers = sorted({taker for _, taker in wrong})
    ranks = tuple(members[each] for each in takers)
    example = examples[operation, min(wrong)]
    if operation != "all-reduce":
        text = (
            f"{capitalized(named(ranks, {}))} received a wrong sum in {operation} "
            f"({example}): it is not known whose contribution is wrong, or whether it "
            "was received wrongly."
        )
        yield Finding(COLLECTIVES_NAME, BROKEN, ranks, text)
    elif len(takers) == len(members) > 1:
        text = (
            f"Some rank's contribution to {operation} is wrong: all ranks received "
            f"a wrong sum ({example}). It is not known whose."
        )
        yield Finding(COLLECTIVES_NAME, BROKEN, (), text)
    else:
        for taker in takers:
            pair = min(each for each in wrong if each[1] == taker)
            text = examples[operation, pair]
            yield _finding(members[taker], operation, "received", text)


def _explained(
    operation: str,
    wrong: set[Pair],
    members: list[int],
    examples: Mapping[tuple[str, Pair], str],
) -> Iterator[Finding]:
    tested = compared_pairs(operation, len(members))
    givers, takers, pairs = faulty_ranks(wrong, tested)
    for side, odd, verb in ((0, givers, "contributed"), (1, takers, "received")):
        for rank in odd:
            pair = min(each for each in wrong if each[side] == rank)
            example = examples[operation, pair]
            yield _finding(members[rank], operation, verb, example)
    for giver, taker in pairs:
        ranks = tuple(sorted({members[giver], members[taker]}))
        text = (
            f"In {operation} rank {members[taker]} received wrongly from rank "
            f"{members[giver]} ({examples[operation, (giver, taker)]})."
        )
        yield Finding(COLLECTIVES_NAME, BROKEN, ranks, text)


def faulty_ranks(
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


def _finding(rank: int, operation: str, verb: str, example: str) -> Finding:
    text = f"Rank {rank} {verb} wrongly in {operation} ({example})."
    return Finding(COLLECTIVES_NAME, BROKEN, (rank,), text)


COLLECTIVES = Stage(COLLECTIVES_NAME, _run_collectives, _judge_collectives)


# The guard's own agreement: one rank has a nan, and all must say the same.


FAULT_INJECTION_NAME = "agreement"
_STEPS = 3  # one before the bad step, and one after it
_BAD_STEP = 1  # counted from 0


@dataclass(frozen=True)
class GuardSummary:
    """The reports and skips of the guard of one rank.

    Attributes:
        planted: The rank with the nan.
        reports: The headline of each bad step, by its number.
        num_skipped: How many steps it skipped.
        weights: A digest of the weights in the end.
    """

    planted: int
    reports: dict[int, str]
    num_skipped: int
    weights: int


def _run_fault_injection(site: StageSite) -> GuardSummary:
    site.note("the agreement of guards")
    torch.manual_seed(0)
    model = nn.Linear(4, 1).to(site.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    planted = len(site.members) // 2
    reports = {}
    guard = OverflowGuard(
        *(model, optimizer),
        on_overflow="skip",
        process_group=dist.group.WORLD,
        explain=False,
    )
    for step in range(_STEPS):
        batch = torch.ones(2, 4, device=site.device)
        if step == _BAD_STEP and site.position == planted:
            batch[0, 0] = torch.nan
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if guard.last_step_skipped and guard.last_report is not None:
            reports[step] = guard.last_report.headline()
    weights = int(digest_of(model.weight))
    skipped = guard.num_skipped
    guard.disable()
    return GuardSummary(site.members[planted], reports, skipped, weights)


def _judge_fault_injection(
    data: Mapping[int, GuardSummary], settings: ExaminationSettings
) -> list[Finding]:
    def said(told: GuardSummary) -> tuple[object, ...]:
        return tuple(told.reports.items()), told.num_skipped, told.weights

    found = []
    odd = odd_ones({rank: said(each) for rank, each in data.items()})
    if odd is not None:
        ranks = tuple(odd[1])
        text = (
            "The guards do not agree on a nan that was planted on rank "
            f"{next(iter(data.values())).planted}: {named(ranks, {})} differ."
        )
        found.append(Finding(FAULT_INJECTION_NAME, BROKEN, ranks, text))
    missed = [
        rank
        for rank, each in data.items()
        if set(each.reports) != {_BAD_STEP} or each.num_skipped != 1
    ]
    if missed and odd is None:
        text = (
            f"The guard of {named(missed, {})} did not skip the one step with a nan "
            "and no other."
        )
        found.append(Finding(FAULT_INJECTION_NAME, BROKEN, tuple(missed), text))
    return found


AGREEMENT = Stage(FAULT_INJECTION_NAME, _run_fault_injection, _judge_fault_injection)


# The first collective: the process group is made, and all ranks meet in a barrier.


FIRST_BARRIER_NAME = "barrier"


@dataclass(frozen=True)
class BarrierResult:
    """A rank that came out of the barrier.

    Attributes:
        host: The name of its host.
        network: The network that NCCL uses between hosts, or "".
    """

    host: str
    network: str = ""


def _run_first_barrier(site: StageSite) -> BarrierResult:
    site.note("a barrier")
    if site.device.type == "cuda":
        dist.barrier(device_ids=[site.device.index])
    else:
        dist.barrier()
    return BarrierResult(site.hosts[site.rank], site.network())


def _judge_first_barrier(
    data: Mapping[int, BarrierResult], settings: ExaminationSettings
) -> list[Finding]:
    networks = {rank: each.network for rank, each in data.items() if each.network}
    if not networks:
        return []
    odd = odd_ones(networks)
    if odd is not None:
        ranks = tuple(odd[1])
        text = (
            f"NCCL's network is not the same on all ranks: {named(ranks, {})} differ."
        )
        return [Finding(FIRST_BARRIER_NAME, BROKEN, ranks, text)]
    slow = slow_network(networks, len({each.host for each in data.values()}))
    return [Finding(FIRST_BARRIER_NAME, WARNING, (), slow)] if slow else []


BARRIER = Stage(FIRST_BARRIER_NAME, _run_first_barrier, _judge_first_barrier)
