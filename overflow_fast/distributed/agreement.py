"""All ranks of a process group decide alike: one small collective for each step."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ..recording.watch import ModelWatch
from ..report.report import Report
from ..verdict.verdict import Verdict
from .joinable import GuardJoinable
from .participants import Participants, world_size
from .peers import Peers

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
            groups that show in the models and their optimizers, unless the policy is
            to warn.
        watches: The watched models.
        may_act: Whether something else than a warning may follow.

    Attributes:
        error: What a collective has raised, or None.
    """

    def __init__(
        self, process_group: Any, watches: Sequence[ModelWatch], may_act: bool
    ) -> None:
        self._watches = watches
        self._who = Participants(process_group, watches, may_act)
        self.error: Exception | None = None

    @property
    def is_needed(self) -> bool:
        """Whether there are other ranks to agree with. Found out at the first step."""
        return self._who.decide_together

    @property
    def is_shadowing(self) -> bool:
        """Whether `Join` makes the step at hand for a rank that has no batch."""
        return self._who.is_shadowing

    def see(self, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
        """Sets what returns the optimizers, which may show process groups too."""
        self._who.optimizers = optimizers

    def make_joinable(self, judge: Callable[[], None]) -> GuardJoinable:
        """What takes part for ranks without batches; judge() judges a step of others.

        Raises:
            RuntimeError: If the ranks do not decide together in one process group.
        """
        if self._who.joinable is None:
            peers = self._meet() if self.is_needed else None
            groups = peers.groups if peers is not None else []
            if len(groups) != 1:
                raise RuntimeError(
                    "joinable needs a guard whose ranks decide together in one process "
                    f"group, got {len(groups)}: initialize torch.distributed, and give "
                    "process_group="
                )
            self._who.joinable = GuardJoinable(
                groups[0],
                self._device,
                lambda: None if self._who.optimizers_join else judge(),
            )
        return self._who.joinable

    def agree_on(self, step: int, report: Report | None) -> Report | None:
        """The report of a rank that has one, or None, whatever the policy.

        Of the ranks that share the model or, where that does not show, of all.
        """
        verdict = Verdict() if report is None else report.verdict
        own = report or Report(step, "raise", verdict)
        peers = self._meet()
        if peers is None and world_size() > 1:
            peers = Peers.of(dist.group.WORLD)
        return self._agree(peers, step, verdict, 0, lambda: own)[0]

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
        with self._letting_out():
            self._who.notify()
        return self._agree(self._meet(), step, verdict, position, make_report)

    def _agree(
        self,
        peers: Peers | None,
        step: int,
        verdict: Verdict,
        position: int,
        make_report: Callable[[], Report],
    ) -> tuple[Report | None, bool]:
        blame = 0
        if verdict.first is not None:
            blame = _blame(verdict.first.kind, position)
        worst, most, least = self._maximum(peers, [blame, step, -step])
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
                own = dataclasses.replace(make_report(), where=self._where(peers))
            except Exception as raised:  # the others wait for what comes of it
                error, own = raised, f"{type(raised).__name__}: {raised}"
        gathered = self._gather(peers, own)
        if error is not None:
            raise error
        found = next(each for each in gathered if each is not None)
        if isinstance(found, str):
            with self._letting_out():
                raise RuntimeError(f"the policy of the rank that found it: {found}")
        return found, is_own

    def all_say(self, value: bool) -> bool:
        """Whether all ranks that decide together say so, or have no batch."""
        if not self.is_needed:
            return value
        is_against = not (value or self.is_shadowing)
        return self._maximum(self._meet(), [int(is_against)]) == [0]

    def gather(self, value: Any) -> list[Any]:
        """What each rank gives, of all ranks that share the model."""
        return self._gather(self._meet(), value)

    # Collectives.

    def _meet(self) -> Peers | None:
        with self._letting_out():
            return self._who.meet()

    @contextlib.contextmanager
    def _letting_out(self) -> Iterator[None]:
        """Notes what is raised: it is no failure of the guard."""
        try:
            yield
        except Exception as error:
            self.error = error
            raise

    def _maximum(self, peers: Peers | None, values: list[int]) -> list[int]:
        if peers is None:
            return values
        with self._letting_out():
            return peers.maximum(values)

    def _gather(self, peers: Peers | None, value: Any) -> list[Any]:
        if peers is None:
            return [value]
        with self._letting_out():
            return peers.gather(value)

    def _where(self, peers: Peers | None) -> str | None:
        if peers is None:
            return None
        rank, world = dist.get_rank(), dist.get_world_size()
        return f"rank {rank} of {world} ({socket.gethostname()}, {self._device()})"

    def _device(self) -> torch.device:
        return self._watches[0].device or torch.device("cpu")


def _blame(kind: str, position: int) -> int:
    """Larger for what was bad earlier; among equals, for the lower rank."""
    severity, earliness = _SEVERITY.get(kind, 3), max(0, _LAST - position)
    rank = dist.get_rank() if world_size() > 1 else 0
    return (severity * (_LAST + 1) + earliness) * _LAST - rank
