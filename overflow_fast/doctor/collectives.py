"""Collectives of values whose result is exact, and who spoils it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from .links import culprits
from .stage import (
    BROKEN,
    ExaminationSettings,
    Finding,
    Pair,
    Site,
    Stage,
    capital,
    named,
)

NAME = "collectives"
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


def _run(site: Site) -> tuple[list[Wrong], list[str]]:
    """Runs all; returns the wrong results of this rank, and what cannot be run."""
    wrong, unsupported = list[Wrong](), list[str]()
    world, rank = len(site.members), site.position
    for name, operation in OPERATIONS.items():
        for dtype in DTYPES:
            short = str(dtype).removeprefix("torch.")
            site.note(f"{name} of {short}")
            try:
                rows = list(operation(rank, world, dtype, site.device))
            except (RuntimeError, ValueError, TypeError) as error:
                if not any(each in str(error).lower() for each in _UNSUPPORTED):
                    raise
                unsupported.append(f"{name} of {short}")
                continue
            for contributor, expected, received in rows:
                if not torch.equal(_comparable(expected), _comparable(received)):
                    text = f"{received.tolist()} instead of {expected.tolist()}"
                    wrong.append((name, short, contributor, text))
    return wrong, unsupported


def _comparable(values: torch.Tensor) -> torch.Tensor:
    """The values with one bit pattern for nan, of which there are many."""
    if not values.is_floating_point():
        return values
    return torch.stack([values.isnan().double(), values.double().nan_to_num(0.0)])


def _judge(data: Mapping[int, Any], settings: ExaminationSettings) -> list[Finding]:
    members = sorted(data)
    wrong: dict[str, set[Pair]] = {}
    examples: dict[tuple[str, Pair], str] = {}
    for q, rank in enumerate(members):
        for operation, dtype, contributor, text in data[rank][0]:
            pair = contributor, q
            wrong.setdefault(operation, set()).add(pair)
            examples.setdefault((operation, pair), f"{dtype}: {text}")
    return [
        finding
        for operation, pairs in wrong.items()
        for finding in _explained(operation, pairs, members, examples)
    ]


def _explained(
    operation: str,
    wrong: set[Pair],
    members: list[int],
    examples: Mapping[tuple[str, Pair], str],
) -> Iterator[Finding]:
    tested = compared_pairs(operation, len(members))
    givers, takers, pairs = culprits(wrong, tested)
    for rank in givers:
        example = next(
            examples[operation, pair] for pair in sorted(wrong) if pair[0] == rank
        )
        yield _finding([members[rank]], operation, "contributed", example)
    for rank in takers:
        example = next(
            examples[operation, pair] for pair in sorted(wrong) if pair[1] == rank
        )
        yield _finding([members[rank]], operation, "received", example)
    for giver, taker in pairs:
        ranks = tuple(sorted({members[giver], members[taker]}))
        text = (
            f"In {operation} rank {members[taker]} received wrongly from rank "
            f"{members[giver]} ({examples[operation, (giver, taker)]})."
        )
        yield Finding(NAME, BROKEN, ranks, text)


def _finding(ranks: list[int], operation: str, verb: str, example: str) -> Finding:
    text = f"{capital(named(ranks, {}))} {verb} wrongly in {operation} ({example})."
    return Finding(NAME, BROKEN, tuple(ranks), text)


COLLECTIVES = Stage(NAME, _run, _judge)
