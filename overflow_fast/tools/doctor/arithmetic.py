"""Finds who computes wrongly: known products, results twice, bits of other ranks."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ...base.digests import digest_of
from ...base.majority import odd_ones
from ...base.text import capitalized, dtype_name
from .roll_call import kind_of
from .stage import BROKEN, Finding, Hosts, Stage, StageSite, named

NAME = "arithmetic"
_SEED = 20  # any: all devices draw the same
_SIDE = 256
# Factors of products that are exact in the dtype, however they are summed up.
_LARGEST = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 8, torch.float64: 64}


@dataclass(frozen=True)
class Digests:
    """The results of one rank.

    Attributes:
        kind: The kind of its device: only within one kind all bits must agree.
        wrong: The products whose exact result came out wrong.
        first: Digests of other arithmetic, by its name.
        again: The same, computed once more.
    """

    kind: str
    wrong: list[str]
    first: dict[str, int]
    again: dict[str, int]


def _run(site: StageSite) -> Digests:
    site.note("products with known results")
    wrong = [
        dtype_name(dtype) for dtype in _LARGEST if not is_exact(dtype, site.device)
    ]
    site.note("arithmetic")
    first = _digests(site.device)
    site.note("arithmetic, again")
    return Digests(kind_of(site.device), wrong, first, _digests(site.device))


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


_OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "product": lambda x: x @ x.T,
    "exp": torch.exp,
    "softmax": lambda x: torch.softmax(x, -1),
    "sum": lambda x: x.sum(0),
    "sort": lambda x: x.flatten().sort().values,
}


def _digests(device: torch.device) -> dict[str, int]:
    # Drawn on the CPU: generators of devices differ between kinds.
    chance = torch.Generator().manual_seed(_SEED)
    values = torch.randn(_SIDE, _SIDE, generator=chance).to(device)
    return {
        f"{name} of {dtype_name(dtype)}": int(digest_of(operation(values.to(dtype))))
        for dtype in (torch.float32, torch.bfloat16)
        for name, operation in _OPERATIONS.items()
    }


def _judge(data: Mapping[int, Digests], hosts: Hosts) -> list[Finding]:
    found = []
    for rank, each in data.items():
        who = capitalized(named([rank], hosts))
        if each.wrong:
            text = (
                f"{who} computes wrongly: a product of {', '.join(each.wrong)} whose "
                "exact result is known came out different."
            )
            found.append(Finding(NAME, BROKEN, (rank,), text))
        unsteady = [name for name in each.first if each.first[name] != each.again[name]]
        if unsteady:
            text = f"{who} computed {', '.join(unsteady)} twice, with different bits."
            found.append(Finding(NAME, BROKEN, (rank,), text))
    known = {rank for finding in found for rank in finding.ranks}
    rest = {rank: each for rank, each in data.items() if rank not in known}
    return found + _with_other_bits(rest, hosts)


def _with_other_bits(data: Mapping[int, Digests], hosts: Hosts) -> list[Finding]:
    """The ranks whose bits differ from those of the others of their kind."""
    kinds = collections.defaultdict[str, dict[int, tuple[tuple[str, int], ...]]](dict)
    for rank, each in data.items():
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
        found.append(Finding(NAME, BROKEN, ranks, text))
    return found


ARITHMETIC = Stage(NAME, _run, _judge, needs_group=False)
