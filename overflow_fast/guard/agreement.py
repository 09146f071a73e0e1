"""All ranks of a process group decide alike: one small collective for each step."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..names import has_base
from .joining import GuardJoinable
from .report import Report
from .verdict import Verdict
from .watch import ModelWatch

_log = logging.getLogger("overflow_fast")
_DATA_PARALLEL = {"DistributedDataParallel", "FullyShardedDataParallel"}
# What of a step is sent: the blame, the step and its negative, padded to 64 bytes.
_NUM_WORDS = 8
# Who has seen the bad value earlier is to blame: what a collective of the training has
# mixed into a gradient is bad on every rank.
_LAST = 2**24
_SEVERITY = {"grad_output": 2, "gradient": 1, "optimizer_state": 1}


class Agreement:
    """Agrees on the verdict of a step among the ranks that train together.

    Every rank joins one all-reduce of 64 bytes for each judged step; if a rank has
    found something, also in one gathering of reports. Errors of the collectives, a
    timeout among them, are those of the process group.

    Args:
        process_group: A process group, a device mesh, False for none, or None: the
            group of a model that is under DDP or FSDP, or whose parameters are
            DTensors, unless the policy is to warn.
        watches: The watched models.
        may_act: Whether something else than a warning may follow.

    Attributes:
        joinable: What takes part for ranks that have no batches left, or None.
        error: What a collective has raised, or None.
    """

    def __init__(
        self, process_group: Any, watches: Sequence[ModelWatch], may_act: bool
    ) -> None:
        self._given = process_group
        self._watches = watches
        self._may_act = may_act
        self._groups: list[Any] | None = None
        self._has_warned = False
        self.joinable: GuardJoinable | None = None
        self.error: Exception | None = None

    @property
    def is_needed(self) -> bool:
        """Whether there are other ranks to agree with. Found out at the first step."""
        acts = self._may_act or self._given is not None
        return acts and bool(self._shared) and not self._is_left_out()

    @property
    def _shared(self) -> list[Any]:
        """The groups of the ranks that share the model, whether or not they decide."""
        if self._groups is None:
            self._groups = [g for g in self._find() if dist.get_world_size(g) > 1]
        return self._groups

    def make_joinable(self, judge: Callable[[], None]) -> GuardJoinable:
        """What takes part for ranks without batches; judge() judges a step of others.

        Raises:
            RuntimeError: If the ranks do not decide together in one process group.
        """
        if self.joinable is None:
            groups = self._shared if self.is_needed else []
            if len(groups) != 1:
                raise RuntimeError(
                    "joinable needs a guard whose ranks decide together in one process "
                    f"group, got {len(groups)}: initialize torch.distributed, and give "
                    "process_group="
                )
            self.joinable = GuardJoinable(groups[0], self._device, judge)
        return self.joinable

    def agree_on(self, step: int, report: Report | None) -> Report | None:
        """The report of a rank that has one, or None, whatever the policy.

        Of the ranks that share the model or, where that does not show, of all.
        """
        is_there = dist.is_available() and dist.is_initialized()
        world = [dist.group.WORLD] if is_there and dist.get_world_size() > 1 else []
        verdict = Verdict() if report is None else report.verdict
        own = report or Report(step, "raise", verdict)
        groups = self._shared or world
        return self._agree(groups, step, verdict, 0, lambda: own)[0]

    def agree(
        self,
        step: int,
        verdict: Verdict,
        position: int,
        make_report: Callable[[], Report],
    ) -> tuple[Report | None, bool]:
        """Agrees on a step.

        Incurs a CPU-GPU sync where the group's collectives run on a GPU.

        Args:
            step: The step's number.
            verdict: This rank's.
            position: How many frames the step had before the first bad one.
            make_report: Makes this rank's report; called on one rank.

        Returns:
            The report that all ranks act on, or None if no rank has found anything, and
            whether it is this rank's own.

        Raises:
            RuntimeError: If the ranks are at different steps, or make_report() raised
                on another one.
        """
        if self.joinable is not None:
            with self._letting_out():
                self.joinable.notify(self._has_joining_model())
        return self._agree(self._shared, step, verdict, position, make_report)

    def _agree(
        self,
        groups: list[Any],
        step: int,
        verdict: Verdict,
        position: int,
        make_report: Callable[[], Report],
    ) -> tuple[Report | None, bool]:
        blame = 0
        if verdict.first is not None:
            blame = _blame(verdict.first.kind, position)
        worst, most, least = self._maximum(groups, [blame, step, -step])
        if most != -least:
            raise RuntimeError(
                "the ranks judge different steps, from "
                f"{-least} to {most}: each has to make the same optimizer steps"
            )
        if worst == 0:
            return None, False
        is_own = blame == worst
        own: Report | str | None = None
        error: Exception | None = None
        if is_own:
            try:
                own = dataclasses.replace(make_report(), where=self._where(groups))
            except Exception as raised:  # the others wait for what comes of it
                error, own = raised, f"{type(raised).__name__}: {raised}"
        gathered = self._gather(groups, own)
        if error is not None:
            raise error
        found = next(each for each in gathered if each is not None)
        if isinstance(found, str):
            with self._letting_out():
                raise RuntimeError(f"the policy of the rank that found it: {found}")
        return found, is_own

    def gather(self, value: Any) -> list[Any]:
        """What each rank gives, of all ranks that share the model."""
        return self._gather(self._shared, value)

    # Who takes part.

    def _find(self) -> list[Any]:
        if self._given is False or not (dist.is_available() and dist.is_initialized()):
            return []
        if self._given is not None:
            return _groups_of(self._given)
        models = [watch.model for watch in self._watches]
        found = (_group_of_model(model) for model in models if model is not None)
        group = next((group for group in found if group is not None), None)
        return _groups_of(group) if group is not None else []

    def _is_left_out(self) -> bool:
        """Whether ranks without batches join others' collectives, but not ours."""
        if self.joinable is not None and self.joinable.is_entered:
            return False
        is_left_out = self._has_joining_model()
        if is_left_out and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "model.join() knows nothing of the guard: each rank decides for itself "
                "from now on. `with Join([model, guard.joinable]):` has them decide "
                "together (torch.distributed.algorithms.join)."
            )
        return is_left_out

    def _has_joining_model(self) -> bool:
        configs = (getattr(w.model, "_join_config", None) for w in self._watches)
        return any(getattr(config, "enable", False) for config in configs)

    # Collectives.

    @contextlib.contextmanager
    def _letting_out(self) -> Iterator[None]:
        """Notes what is raised: it is no failure of the guard."""
        try:
            yield
        except Exception as error:
            self.error = error
            raise

    def _maximum(self, groups: list[Any], values: list[int]) -> list[int]:
        words = torch.zeros(_NUM_WORDS, dtype=torch.int64)
        words[: len(values)] = torch.tensor(values)
        for group in groups:
            with self._letting_out():
                here = words.to(_device_of(group))
                dist.all_reduce(here, dist.ReduceOp.MAX, group=group)
                words = here.cpu()
        found: list[int] = words[: len(values)].tolist()
        return found

    def _gather(self, groups: list[Any], value: Any) -> list[Any]:
        values = [value]
        for group in groups:
            of_group: list[Any] = [None] * dist.get_world_size(group)
            with self._letting_out():
                dist.all_gather_object(of_group, values, group=group)
            values = [each for several in of_group for each in several]
        return values

    def _where(self, groups: list[Any]) -> str | None:
        if not groups:
            return None
        rank, world = dist.get_rank(), dist.get_world_size()
        return f"rank {rank} of {world} ({socket.gethostname()}, {self._device()})"

    def _device(self) -> torch.device:
        return self._watches[0].device or torch.device("cpu")


def _blame(kind: str, position: int) -> int:
    """Larger for what was bad earlier; among equals, for the lower rank."""
    severity, earliness = _SEVERITY.get(kind, 3), max(0, _LAST - position)
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return (severity * (_LAST + 1) + earliness) * _LAST - rank


def _groups_of(group: Any) -> list[Any]:
    """The process groups that together reach all ranks of a group or a mesh."""
    if isinstance(group, dist.device_mesh.DeviceMesh):
        return [group.get_group(dim) for dim in range(group.ndim)]
    return [group]


def _group_of_model(model: nn.Module) -> Any | None:
    """The group of a model's ranks, as far as it shows: DDP's, FSDP's, a mesh."""
    for module in model.modules():
        if has_base(type(module), _DATA_PARALLEL):
            return module.process_group
    meshes = [
        parameter.device_mesh  # type: ignore[attr-defined]
        for parameter in model.parameters()
        if hasattr(parameter, "_local_tensor")
    ]
    return max(meshes, key=lambda mesh: mesh.ndim, default=None)


def _device_of(group: Any) -> torch.device:
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
