"""The collectives: a barrier, then values whose result is exact, and who spoils it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from ...base.text import capitalized, dtype_name
from .stage import BROKEN, Finding, Hosts, Stage, StageSite, named


def _run_barrier(site: StageSite) -> None:
    site.note("a barrier")
    ids = [site.device.index] if site.device.type == "cuda" else None
    dist.barrier(device_ids=ids)


BARRIER = Stage("barrier", _run_barrier)


NAME = "collectives"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
_WIDTH = 4  # values that a rank contributes: a number, nan, inf, -inf
_MOST_ROOTS = 4  # of broadcasts


def values_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Makes what a rank contributes: exact in its dtype, alone or added to zeros."""
    number = 1 + rank % 100
    if dtype.is_floating_point:
        values = [number + 0.5, math.nan, math.inf, -math.inf]
    else:
        values = [number, number + 1, number + 2, number + 3]
    return torch.tensor(values, dtype=dtype)


# Each yields the contributor, what it contributed, and what was received of that.
Rows: TypeAlias = Iterator[tuple[int, torch.Tensor, torch.Tensor]]


def _all_reduce(rank: int, world: int, dtype: torch.dtype, to: torch.device) -> Rows:
    # Only one rank gives each row anything but zeros, so that no sum is rounded.
    rows = torch.zeros(world, _WIDTH, dtype=dtype)
    rows[rank] = values_of(rank, dtype)
    rows = rows.to(to)
    dist.all_reduce(rows)
    return _compared(rows)


def _all_gather(rank: int, world: int, dtype: torch.dtype, to: torch.device) -> Rows:
    rows = torch.zeros(world, _WIDTH, dtype=dtype, device=to)
    dist.all_gather(list(rows.unbind()), values_of(rank, dtype).to(to))
    return _compared(rows)


def _all_to_all(rank: int, world: int, dtype: torch.dtype, to: torch.device) -> Rows:
    rows = torch.zeros(world, _WIDTH, dtype=dtype, device=to)
    given = values_of(rank, dtype).repeat(world, 1).to(to)
    dist.all_to_all_single(rows, given)
    return _compared(rows)


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
    step = max(1, world // _MOST_ROOTS)
    for root in range(0, world, step)[:_MOST_ROOTS]:
        row = values_of(rank, dtype).to(to)
        dist.broadcast(row, root)
        yield root, values_of(root, dtype), row.cpu()


def _compared(rows: torch.Tensor) -> Rows:
    for rank, received in enumerate(rows.cpu()):
        yield rank, values_of(rank, rows.dtype), received


OPERATIONS: dict[str, Callable[[int, int, torch.dtype, torch.device], Rows]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "broadcast": _broadcast,
}
_REDUCING = ("all-reduce", "reduce-scatter")

# What a rank received wrongly: by operation, then by the contributor's position.
Wrong: TypeAlias = dict[str, dict[int, str]]


def _run(site: StageSite) -> Wrong:
    wrong: Wrong = {}
    world, rank = len(site.members), site.position
    for name, operation in OPERATIONS.items():
        for dtype in DTYPES:
            short = dtype_name(dtype)
            site.note(f"{name} of {short}")
            for giver, expected, received in operation(rank, world, dtype, site.device):
                if not _is_same(expected, received):
                    text = f"{short}: {received.tolist()} instead of "
                    text += f"{expected.tolist()}"
                    wrong.setdefault(name, {}).setdefault(giver, text)
    return wrong


def _is_same(expected: torch.Tensor, received: torch.Tensor) -> bool:
    """True for the same values; nan has many bit patterns."""
    return torch.equal(expected.isnan(), received.isnan()) and torch.equal(
        *(each.double().nan_to_num(0.0) for each in (expected, received))
    )


def _judge(data: Mapping[int, Wrong], hosts: Hosts) -> list[Finding]:
    members = sorted(data)
    found = []
    for operation in OPERATIONS:
        # By the ranks of giver and taker.
        wrong = {
            (members[giver], taker): text
            for taker in members
            for giver, text in data[taker].get(operation, {}).items()
        }
        if wrong and operation in _REDUCING:
            found.append(_wrong_sum(operation, wrong, members, hosts))
        elif wrong:
            found += _wrong_values(operation, wrong, members, hosts)
    return found


Pairs: TypeAlias = Mapping[tuple[int, int], str]


def _wrong_sum(
    operation: str, wrong: Pairs, members: Sequence[int], hosts: Hosts
) -> Finding:
    """Names the takers: all ranks give to a sum, so a wrong one shows no giver."""
    takers = sorted({taker for _, taker in wrong})
    text = (
        f"{capitalized(named(takers, hosts))} received a wrong sum in {operation} "
        f"({wrong[min(wrong)]})"
    )
    if operation == "all-reduce" and len(takers) < len(members):
        text += "; the others received the same sum right."
    else:
        text += (
            ": it is not known whose contribution is wrong, or whether it was received "
            "wrongly."
        )
    return Finding(NAME, BROKEN, tuple(takers), text)


def _wrong_values(
    operation: str, wrong: Pairs, members: Sequence[int], hosts: Hosts
) -> Iterator[Finding]:
    """Names who gave wrongly to all, and of the others who received from whom."""
    givers = sorted({giver for giver, _ in wrong})
    spoiled = [g for g in givers if all((g, taker) in wrong for taker in members)]
    for giver in spoiled:
        text = (
            f"{capitalized(named([giver], hosts))} contributed wrongly in {operation} "
            f"({wrong[giver, members[0]]})."
        )
        yield Finding(NAME, BROKEN, (giver,), text)
    rest = {pair: text for pair, text in wrong.items() if pair[0] not in spoiled}
    for taker in sorted({taker for _, taker in rest}):
        of = [giver for giver, other in sorted(rest) if other == taker]
        text = (
            f"{capitalized(named([taker], hosts))} received wrongly in {operation} "
            f"from {named(of, hosts)} ({rest[of[0], taker]})."
        )
        yield Finding(NAME, BROKEN, tuple(sorted({taker, *of})), text)


COLLECTIVES = Stage(NAME, _run, _judge)
