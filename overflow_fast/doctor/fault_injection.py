"""The guard's own agreement: one rank has a nan, and all must say the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ..core.tensors import digest_of
from ..guard.guard import OverflowGuard
from .links import odd_ones
from .stage import BROKEN, ExaminationSettings, Finding, Site, Stage, named

NAME = "agreement"
_STEPS = 3
_BAD_STEP = 1


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


def _run(site: Site) -> GuardSummary:
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


def _judge(
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
        found.append(Finding(NAME, BROKEN, ranks, text))
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
        found.append(Finding(NAME, BROKEN, tuple(missed), text))
    return found


AGREEMENT = Stage(NAME, _run, _judge)
