"""The ranks that decide together, and the collectives that reach all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ...scanner.modules import has_base, modules_in
from ...torch_internals.module_internals import (
    fsdp_meshes,
    inter_node_group,
    own_buffers,
    own_parameters,
    replicate_sharing,
)
from ...torch_internals.tensor_internals import mesh_of
from ..optimizers.engines import optimizers_in

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
        known = {dist.get_rank(): [_ranks_of(group) for group in ordered]}
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


def _ranks_of(group: Any) -> _Ranks:
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _order(ranks: _Ranks) -> tuple[int, _Ranks]:
    """Sorts groups alike on all ranks, those of a mesh by its dimensions.

    One pass then reaches all ranks of a mesh.
    """
    return ranks[1] - ranks[0], ranks


def _place(group: Any) -> tuple[tuple[int, _Ranks], str]:
    return _order(_ranks_of(group)), group.group_name


def _device_of(group: Any) -> torch.device:
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


# Finds the process groups of models and optimizers.


_DATA_PARALLEL = {"DistributedDataParallel", "FullyShardedDataParallel"}


def find_groups(models: Iterable[nn.Module], optimizers: Iterable[Any]) -> list[Any]:
    """Finds the process groups of the ranks that share models or optimizers.

    Those of DDP, FSDP, composable `replicate()`, those of the meshes of DTensors, and
    those that a module or an optimizer has as an attribute: of tensor, pipeline or
    data parallelism in engines such as Megatron's and DeepSpeed's. As far as this rank
    is in them. Calls no collective.

    Args:
        models: The models, as they train: their wrappers have the groups.
        optimizers: Their optimizers.

    Returns:
        The groups of more than one rank, each once.
    """
    found: list[Any] = []
    meshes: list[Any] = []
    for module in (each for model in models for each in modules_in(model)):
        found += _groups_of(module)
        found += vars(module).values()
        meshes += _meshes_of(module)
    for _, each in (pair for outer in optimizers for pair in optimizers_in(outer)):
        found.append(getattr(each, "process_group", None))
        found += getattr(each, "__dict__", {}).values()
        # DDP over tensor parallelism leaves DTensors in no module's parameters.
        groups = getattr(each, "param_groups", ())
        meshes += _meshes_of_tensors(p for group in groups for p in group["params"])
    for mesh in _distinct(meshes):
        found += groups_of_mesh(mesh)
    return shared(found)


def groups_of_mesh(mesh: Any) -> list[Any]:
    """The process groups that together reach all ranks of a device mesh."""
    if mesh.size() == dist.get_world_size():
        return [dist.group.WORLD]
    if mesh.get_coordinate() is None:  # this rank is not in it
        return []
    return [mesh.get_group(dim) for dim in range(mesh.ndim)]


def shared(groups: Iterable[Any]) -> list[Any]:
    """The process groups that this rank shares with others, each once."""
    found = [each for each in groups if isinstance(each, dist.ProcessGroup)]
    # An engine has several of the same ranks.
    once = {_ranks_of(group): group for group in reversed(found)}
    return [group for ranks, group in reversed(once.items()) if len(ranks) > 1]


def replicating_group(parameter: torch.Tensor, ddp: Any) -> Any:
    """The process group of the ranks that hold the same bits of a parameter, or None.

    Args:
        parameter: The parameter; of a DTensor, its mesh says who shares it.
        ddp: The DistributedDataParallel around it, or None.
    """
    if ddp is not None:
        return ddp.process_group
    mesh = mesh_of(parameter)
    if mesh is None or mesh.get_coordinate() is None:
        return None
    dims = [d for d, each in enumerate(parameter.placements) if each.is_replicate()]  # type: ignore[attr-defined]
    return mesh.get_group(dims[0]) if dims else None


def _groups_of(module: nn.Module) -> Sequence[Any]:
    if has_base(type(module), _DATA_PARALLEL):
        # FSDP with hybrid sharding has a second one.
        return [getattr(module, "process_group", None), inter_node_group(module)]
    if has_base(type(module), {"DDP"}):
        return _groups_of_replicated(module)
    return []


def _groups_of_replicated(module: nn.Module) -> Sequence[Any]:
    sharing = replicate_sharing(module)
    if sharing is None:
        return []
    group, mesh = sharing
    if mesh is not None:
        return groups_of_mesh(mesh)
    return [group or dist.group.WORLD]


def _meshes_of(module: nn.Module) -> Iterator[Any]:
    own = (own_parameters(module), own_buffers(module), vars(module))
    yield from _meshes_of_tensors(value for each in own for value in each.values())
    if has_base(type(module), {"FSDPModule"}):
        # Between forward and backward the parameters may be whole tensors.
        yield from fsdp_meshes(module)


def _meshes_of_tensors(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            mesh = mesh_of(value)
            if isinstance(mesh, dist.device_mesh.DeviceMesh):
                yield mesh


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
