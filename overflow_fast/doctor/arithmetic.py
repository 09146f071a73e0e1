"""The same arithmetic on every rank: digests that must agree, and known results."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..core.tensors import digest_of
from .links import odd_ones
from .roll_call import facts_of
from .stage import BROKEN, ExaminationSettings, Finding, Site, Stage, capital, named

NAME = "arithmetic"
_SEED = 20
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


def _run(site: Site) -> Digests:
    site.note("products with known results")
    wrong = [
        str(dtype).removeprefix("torch.")
        for dtype in _LARGEST
        if not is_exact(dtype, site.device)
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


def _digests(site: Site) -> dict[str, int]:
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
            found[f"{name} of {str(dtype)[6:]}"] = int(digest_of(result))
    return found


def _judge(data: Mapping[int, Digests], settings: ExaminationSettings) -> list[Finding]:
    hosts = {rank: each.host for rank, each in data.items()}
    found = []
    for rank, each in data.items():
        who = capital(named([rank], hosts))
        if each.wrong:
            text = (
                f"{who} computes wrongly: a product of {', '.join(each.wrong)} whose "
                "exact result is known came out different."
            )
            found.append(Finding(NAME, BROKEN, (rank,), text))
        differing = [
            name for name in each.first if each.first[name] != each.again[name]
        ]
        if differing:
            text = f"{who} computed {', '.join(differing)} twice, with different bits."
            found.append(Finding(NAME, BROKEN, (rank,), text))
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
            f"{capital(named(ranks, hosts))} computed other bits than the other "
            f"ranks with {kind}: silent data corruption, or another library."
        )
        if odd[0] is None:
            text = (
                f"The ranks with {kind} computed different bits; there is no majority."
            )
        found.append(Finding(NAME, BROKEN, ranks, text))
    return found


ARITHMETIC = Stage(NAME, _run, _judge, needs_group=False)
