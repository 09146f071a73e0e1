"""The process groups of models and optimizers, found without a collective."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...base.modules import has_base, modules_in
from ...torch_internals.module_internals import (
    fsdp_meshes,
    inter_node_group,
    own_buffers,
    own_parameters,
    replicate_sharing,
)
from ...torch_internals.tensor_internals import mesh_of
from ..optimizers.held_optimizers import optimizers_in

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
    once = {ranks_of(group): group for group in reversed(found)}
    return [group for ranks, group in reversed(once.items()) if len(ranks) > 1]


def ranks_of(group: Any) -> tuple[int, ...]:
    """Returns the ranks of a group, in order."""
    return tuple(sorted(dist.get_process_group_ranks(group)))


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
