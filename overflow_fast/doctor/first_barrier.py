"""The first collective: the process group is made, and all ranks meet in a barrier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from .links import odd_ones
from .roll_call import slow_network
from .stage import BROKEN, WARNING, ExaminationSettings, Finding, Site, Stage, named

NAME = "barrier"


@dataclass(frozen=True)
class BarrierResult:
    """A rank that came out of the barrier.

    Attributes:
        host: The name of its host.
        network: The network that NCCL uses between hosts, or "".
    """

    host: str
    network: str = ""


def _run(site: Site) -> BarrierResult:
    site.note("a barrier")
    if site.device.type == "cuda":
        dist.barrier(device_ids=[site.device.index])
    else:
        dist.barrier()
    return BarrierResult(site.hosts[site.rank], site.network())


def _judge(
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
        return [Finding(NAME, BROKEN, ranks, text)]
    slow = slow_network(networks, len({each.host for each in data.values()}))
    return [Finding(NAME, WARNING, (), slow)] if slow else []


BARRIER = Stage(NAME, _run, _judge)
