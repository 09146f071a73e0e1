"""The comparison of replicas bit for bit, by digests, in which every rank joins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ...base.digests import digest_of
from ...base.majority import odd_ones
from ...base.modules import is_ddp, named_modules, tensor_name
from ...base.tree import plain_key, tensors
from ...torch_internals.module_internals import own_parameters
from ...torch_internals.tensor_internals import local_part
from ..optimizers.held_optimizers import optimizers_in
from ..ranks.groups import replicating_group


@dataclass(frozen=True)
class ReplicaDifference:
    """A tensor whose replicas differ.

    Attributes:
        name: Its name.
        ranks: The ranks whose bits differ from those of most; empty if there is no
            majority.
        group: All ranks that hold a replica.
    """

    name: str
    ranks: list[int]
    group: list[int]


class ReplicaCheck:
    """Compares the replicas that data parallelism keeps on several ranks.

    Of parameters under DDP and `replicate()`, of DTensors along the dimensions of their
    mesh that replicate them (HSDP), and of the optimizers' states of those parameters.

    Args:
        models: The models, by what their modules' names begin with.
        optimizers: Their optimizers.

    Attributes:
        num_compared: How many tensors of this rank were compared with others'.
    """

    def __init__(
        self, models: Mapping[str, nn.Module], optimizers: Iterable[Optimizer]
    ) -> None:
        self._models = models
        self._optimizers = list(optimizers)
        self.num_compared = 0

    def differences(self) -> list[ReplicaDifference]:
        """Compares all replicas; each rank that holds one has to call it.

        A collective of 8 bytes a rank for each group; only where these differ, a second
        one of 8 bytes a tensor. Incurs a CPU-GPU sync.

        Returns:
            The tensors whose replicas differ; the same list on all ranks of a group.
        """
        by_group: dict[Any, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor, group in self._replicated():
            by_group.setdefault(group, []).append((name, tensor))
            self.num_compared += 1
        return [
            each for group, named in by_group.items() for each in _compare(group, named)
        ]

    def _replicated(self) -> Iterator[tuple[str, torch.Tensor, Any]]:
        groups: dict[int, tuple[str, Any]] = {}
        for name, parameter, ddp in self._parameters():
            group = replicating_group(parameter, ddp)
            if group is not None and dist.get_world_size(group) > 1:
                groups[id(parameter)] = name, group
                yield name, local_part(parameter), group
        for _, optimizer in (p for o in self._optimizers for p in optimizers_in(o)):
            states = getattr(optimizer, "state", {})
            for parameter, state in states.items() if groups else ():
                name, group = groups.get(id(parameter), ("", None))
                for path, value in () if group is None else tensors(state):
                    if value.numel():
                        keys = ".".join(str(plain_key(part.value)) for part in path)
                        yield f"{name} ({keys})", local_part(value), group

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter, Any]]:
        for prefix, model in self._models.items():
            ddp = None
            for fqn, module in named_modules(model):
                if is_ddp(module):
                    ddp = module
                for key, parameter in own_parameters(module).items():
                    if parameter is not None and parameter.numel():
                        yield f"{prefix}{tensor_name(fqn, key)}", parameter, ddp


def _compare(
    group: Any, named: Sequence[tuple[str, torch.Tensor]]
) -> list[ReplicaDifference]:
    """Compares the tensors of one group."""
    devices = {tensor.device for _, tensor in named}
    device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
    digests = torch.stack([digest_of(tensor).to(device) for _, tensor in named])
    own = digest_of(digests).reshape(1)
    if len(set(_gathered(group, own).flatten().tolist())) == 1:
        return []
    table = _gathered(group, digests)
    ranks = dist.get_process_group_ranks(group)
    found = []
    for (name, _), column in zip(named, table.T.tolist(), strict=True):
        odd = odd_ones(dict(zip(ranks, column, strict=True)))
        if odd is not None:
            most, differing = odd
            blamed = [] if most is None else differing
            found.append(ReplicaDifference(name, blamed, list(ranks)))
    return found


def _gathered(group: Any, values: torch.Tensor) -> torch.Tensor:
    size = dist.get_world_size(group)
    rows = [torch.empty_like(values) for _ in range(size)]
    dist.all_gather(rows, values, group=group)
    return torch.stack(rows)
