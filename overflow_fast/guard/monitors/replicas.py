"""The monitor of replicas of weights and optimizer states."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...base.modules import parameters_of
from ...base.tensors import place_of
from ...base.text import as_lines, numbered
from ..kinds import whole
from ..options import option
from ..process import has_process_group, own_rank
from .monitor import Guarded, Monitor
from .replica_check import ReplicaCheck, ReplicaDifference

_log = logging.getLogger("overflow_fast")
_FEW = 4  # tensors in a warning; chosen


@dataclass(frozen=True)
class Replicas(Monitor):
    """Replicas of weights and optimizer states under DDP and HSDP, bit for bit.

    An all-gather of 8 bytes, which every rank has to join.
    """

    needs_magnitudes = False

    every: int = field(
        default=1000,
        metadata=option(
            "After one step in this many compare the replicas of weights and optimizer "
            "states.",
            whole(1),
            see="guides/production.md#what-hooks-cannot-see",
        ),
    )

    def start(self, guarded: Guarded) -> Monitor:
        return _ReplicaLog(guarded, self.every)


class _ReplicaLog(Monitor):
    """Logs the replicas that differ.

    Args:
        guarded: The training.
        every: They are compared after one step in this many.
    """

    def __init__(self, guarded: Guarded, every: int) -> None:
        self._guarded = guarded
        self._every = every
        self._num_different = 0
        self._has_warned = False

    def end_step(self, step: int) -> None:
        if step % self._every:
            return
        check = ReplicaCheck(self._guarded.models, self._guarded.optimizers)
        found = check.differences() if has_process_group() else []
        if not check.num_compared:
            self._warn_of_no_replicas()
        if found:
            self._num_different += 1
            self._report(step, found)

    def metrics(self) -> dict[str, float]:
        return {"replicas_different_total": self._num_different}

    def _warn_of_no_replicas(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "Replicas() has nothing to compare: no weight is kept by several "
                "ranks, as under DDP and HSDP.\nLogged once."
            )

    def _report(self, step: int, found: Sequence[ReplicaDifference]) -> None:
        lines = [_difference_text(each) for each in found[:_FEW]]
        if len(found) > _FEW:
            lines.append(f"{len(found) - _FEW} more tensors.")
        own = own_rank()
        if any(own in each.ranks for each in found):
            models = self._guarded.models.values()
            devices = (p.device for model in models for p in parameters_of(model))
            device = next(devices, None)
            lines += [] if device is None else [f"Rank {own} is {place_of(device)}."]
        _log.warning(
            "%s", as_lines([f"Step {step}: replicas of weights differ:", *lines])
        )


def _difference_text(found: ReplicaDifference) -> str:
    if not found.ranks:
        ranks = numbered("rank", found.group)
        return f"{found.name} differs between {ranks}: none is in the majority."
    odd, count = numbered("rank", found.ranks), len(found.group)
    return f"{found.name}: {odd} of {count}; {count - len(found.ranks)} agree."
