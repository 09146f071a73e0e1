"""Finds the ranks that decide with this one, now and while ranks have no batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..recording.watch import ModelWatch
from ..torch_internals.wrappers import is_shadowing
from .groups import find_groups, groups_of_mesh, shared
from .joinable import GuardJoinable, is_first, is_joining
from .peers import Peers

_log = logging.getLogger("overflow_fast")


class Participants:
    """Finds the ranks that share models or optimizers with this one.

    Args:
        process_group: The user's argument; see `Agreement`.
        watches: The watched models.
        may_act: The policy may do more than warn.
        optimizers: Returns the optimizers that step the models.

    Attributes:
        joinable: The object that takes part for ranks without batches, or None.
    """

    def __init__(
        self,
        process_group: Any,
        watches: Sequence[ModelWatch],
        may_act: bool,
        optimizers: Callable[[], Sequence[Optimizer]],
    ) -> None:
        self._given = process_group
        self._watches = watches
        self._may_act = may_act
        self._groups: list[Any] | None = None
        self._peers: Peers | None = None
        self._has_warned = False
        self.joinable: GuardJoinable | None = None
        self._optimizers = optimizers

    @property
    def decide_together(self) -> bool:
        """True if there are other ranks to decide with. Calls no collective."""
        acts = self._may_act or self._given is not None
        return acts and bool(self._shared) and not self._is_left_out()

    @property
    def is_shadowing(self) -> bool:
        """True if `Join` makes the step at hand for a rank that has no batch."""
        return self.joins and is_shadowing()

    @property
    def joins(self) -> bool:
        """True if a `Join` has the guard, a model or an optimizer."""
        joinables = (self.joinable, *self._models(), *self._optimizers())
        return any(map(is_joining, joinables))

    @property
    def optimizers_join(self) -> bool:
        """True if `Join` steps the optimizers, which are judged then as usual."""
        optimizers = self._optimizers()
        return bool(optimizers) and all(map(is_joining, optimizers))

    def meet(self) -> Peers | None:
        """Returns the ranks that share the models, or None; first by a collective."""
        if self._peers is None and self._shared:
            self._peers = Peers.meet(self._shared)
            self._warn_of_others(self._peers.ranks)
        return self._peers

    def notify(self) -> None:
        """Notifies a `Join` that this rank has a batch, unless it has none."""
        if self.joinable is not None and not self.is_shadowing:
            self.joinable.notify(self._models(), self._optimizers())

    @property
    def _shared(self) -> list[Any]:
        """This rank's groups, also if their ranks do not decide together."""
        if self._groups is None:
            self._groups = self._find()
            if not self._groups:
                self._warn_of_others([])
        return self._groups

    def _find(self) -> list[Any]:
        if self._given is False or world_size() == 1:
            return []
        if self._given is None:
            return find_groups(self._models(), self._optimizers())
        if isinstance(self._given, dist.device_mesh.DeviceMesh):
            return shared(groups_of_mesh(self._given))
        return shared([self._given])

    def _models(self) -> list[nn.Module]:
        models = (watch.model for watch in self._watches)
        return [model for model in models if model is not None]

    def _warn_of_others(self, ranks: Sequence[int]) -> None:
        """Logs which ranks decide separately, unless the user has chosen them."""
        world = world_size()
        if self._given is not None or not self._may_act or max(len(ranks), 1) == world:
            return
        who = (
            f"Ranks {_listed(ranks)} of {world} decide together: the process groups "
            "of the model connect no others."
            if ranks
            else f"Rank {dist.get_rank()} of {world} decides alone: the model shows no "
            "process group (DDP, FSDP, DTensor parameters)."
        )
        _log.warning(
            "%s If one rank raises or skips a step, other ranks may still make it. "
            "Give process_group=torch.distributed.group.WORLD for all ranks to decide "
            "together, or process_group=False for each rank to decide alone.",
            who,
        )

    def _is_left_out(self) -> bool:
        """Returns True if a `Join` joins the training's collectives, but not ours."""
        if is_joining(self.joinable):
            return False
        is_model_there = any(map(is_joining, self._models()))
        is_left_out = is_model_there and not self.optimizers_join
        is_left_out |= any(map(is_first, self._optimizers()))
        if is_left_out and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "model.join() does not include the guard: each rank decides for itself "
                "from now on. Use `with Join([model, guard.joinable]):` "
                "(torch.distributed.algorithms.join) for the ranks to decide together."
            )
        return is_left_out


def world_size() -> int:
    """The number of ranks: 1 if torch.distributed is not initialized."""
    is_distributed = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if is_distributed else 1


def _listed(ranks: Sequence[int]) -> str:
    """The ranks, or the first few of many."""
    return ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
