"""The ranks that decide together, and the collectives that reach all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .groups import ranks_of

_T = TypeVar("_T")
_Ranks = tuple[int, ...]
# An all-reduce takes this many int64 values: 64 bytes.
_NUM_WORDS = 8


class Peers:
    """All ranks that process groups connect, directly or through other ranks.

    Shards of a model under DDP over tensor parallelism share a group with two other
    ranks only, and have to decide as all others do. So each collective runs in every
    group, repeated until every rank has the values of every other. All ranks use their
    groups in one order, so that no two ranks wait for each other.

    Args:
        groups: Process groups, each with this rank in it, in the order of all ranks.
        ranks: All ranks that these connect.
        passes: The number of times that a collective runs in each group.

    Attributes:
        groups: The process groups.
        ranks: The ranks, in order.
    """

    def __init__(
        self, groups: Sequence[Any], ranks: Sequence[int], passes: int = 1
    ) -> None:
        self.groups = list(groups)
        self.ranks = list(ranks)
        self._passes = passes

    @classmethod
    def of(cls, group: Any) -> Peers:
        """Makes the peers of one group."""
        return cls([group], dist.get_process_group_ranks(group))

    @classmethod
    def meet(cls, groups: Sequence[Any]) -> Peers:
        """Finds all ranks that groups connect; each of these ranks has to call it.

        A collective, unless one of the groups holds all ranks there are.

        Args:
            groups: This rank's process groups, each of more than one rank.
        """
        world = dist.get_world_size()
        for group in groups:
            if dist.get_world_size(group) == world:
                return cls.of(group)
        ordered = sorted(groups, key=_place)
        known = {dist.get_rank(): [ranks_of(group) for group in ordered]}
        passes = 0
        while passes < num_passes(known):
            known = _merged(ordered, known)
            passes += 1
        if len(known) == world:
            return cls.of(dist.group.WORLD)
        for group in ordered:
            if len(known) == dist.get_world_size(group):
                return cls.of(group)
        return cls(ordered, sorted(known), passes)

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Returns the largest of all ranks for each of up to eight values.

        Incurs a CPU-GPU sync where the groups' collectives run on a GPU.
        """
        words = torch.zeros(_NUM_WORDS, dtype=torch.int64)
        words[: len(values)] = torch.tensor(values)
        for group in self.groups * self._passes:
            here = words.to(_device_of(group))
            dist.all_reduce(here, dist.ReduceOp.MAX, group=group)
            words = here.cpu()
        found: list[int] = words[: len(values)].tolist()
        return found

    def gather(self, value: _T) -> list[_T]:
        """Gathers a value of each rank, in the order of `ranks`."""
        known = {dist.get_rank(): value}
        for _ in range(self._passes):
            known = _merged(self.groups, known)
        return [known[rank] for rank in sorted(known)]


def _merged(groups: Iterable[Any], known: dict[int, _T]) -> dict[int, _T]:
    """Merges the values that the ranks of each group have."""
    for group in groups:
        of_group: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(of_group, known, group=group)
        known = {rank: value for each in of_group for rank, value in each.items()}
    return known


def num_passes(known: Mapping[int, Sequence[_Ranks]]) -> float:
    """The number of passes over the groups until each rank has the values of all.

    Infinite while a rank's groups are not known. Ranks that know all of them get the
    same number, so that none leaves while another still gathers.
    """
    groups = sorted({g for groups in known.values() for g in groups}, key=_order)
    if any(rank not in known for group in groups for rank in group):
        return math.inf
    heard = {rank: {rank} for rank in known}
    passes = 0
    while any(len(each) < len(known) for each in heard.values()):
        passes += 1
        for group in groups:
            together = set().union(*(heard[rank] for rank in group))
            heard.update(dict.fromkeys(group, together))
    return passes


def _order(ranks: _Ranks) -> tuple[int, _Ranks]:
    """Sorts groups alike on all ranks, those of a mesh by its dimensions.

    One pass then reaches all ranks of a mesh.
    """
    return ranks[1] - ranks[0], ranks


def _place(group: Any) -> tuple[tuple[int, _Ranks], str]:
    return _order(ranks_of(group)), group.group_name


def _device_of(group: Any) -> torch.device:
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
