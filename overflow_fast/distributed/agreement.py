"""Makes all ranks of a process group decide alike: one collective for each step."""

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
from ..report.blame import Place
from ..report.report import Report
from ..verdict.verdict import Verdict
from .agreed import Agreed as Agreed
from .agreed import attempted, priority_of
from .joinable import GuardJoinable
from .participants import Participants, world_size
from .peers import Peers


class Agreement:
    """Agrees on the verdict of a step among the ranks that train together.

    Every rank joins one all-reduce of 64 bytes for each judged step, and one gathering
    of reports if a rank has found something. The collectives raise the errors of the
    process group, such as its timeout.

    Args:
        process_group: A process group, a device mesh, False for none, or None: the
            groups that show in the models and their optimizers, unless the policy is
            to warn.
        watches: The watched models.
        may_act: The policy may do more than warn.
        optimizers: Returns the optimizers, which may show process groups too.

    Attributes:
        error: The last error that a collective has raised, or None.
    """

    def __init__(
        self,
        process_group: Any,
        watches: Sequence[ModelWatch],
        may_act: bool,
        optimizers: Callable[[], Sequence[Optimizer]],
    ) -> None:
        self._watches = watches
        self._participants = Participants(process_group, watches, may_act, optimizers)
        self.error: Exception | None = None

    @property
    def is_needed(self) -> bool:
        """True if there are other ranks to agree with; determined at the first step."""
        return self._participants.decide_together

    @property
    def joins(self) -> bool:
        """True if ranks without batches may shadow steps by `Join`."""
        return self._participants.joins

    @property
    def is_shadowing(self) -> bool:
        """True if `Join` makes the step at hand for a rank that has no batch."""
        return self._participants.is_shadowing

    def make_joinable(self, judge: Callable[[], None]) -> GuardJoinable:
        """Makes the object that takes part for ranks without batches.

        Args:
            judge: Judges a step of the other ranks.

        Raises:
            RuntimeError: If the ranks do not decide together in one process group.
        """
        if self._participants.joinable is None:
            peers = self._meet() if self.is_needed else None
            groups = peers.groups if peers is not None else []
            if len(groups) != 1:
                raise RuntimeError(
                    "joinable needs a guard whose ranks decide together in one process "
                    f"group, got {len(groups)}: initialize torch.distributed, and give "
                    "process_group="
                )
            self._participants.joinable = GuardJoinable(
                groups[0],
                self._device,
                lambda: None if self._participants.optimizers_join else judge(),
            )
        return self._participants.joinable

    def agree_on(self, step: int, report: Report | None) -> Report | None:
        """Returns the report of a rank that has one, or None, whatever the policy.

        Asks the ranks that share the model or, if these are not known, all ranks.
        """
        verdict = Verdict() if report is None else report.verdict
        own = report or Report(step, "raise", verdict)
        peers = self._meet()
        if peers is None and world_size() > 1:
            peers = Peers.of(dist.group.WORLD)
        return self._agree(peers, step, verdict, 0, lambda: own).report

    def agree(
        self,
        step: int,
        verdict: Verdict,
        position: int,
        make_report: Callable[[], Report],
        make_offer: Callable[[], Any] = lambda: None,
        has_spike: bool = False,
        wants_skip: bool = False,
    ) -> Agreed:
        """Agrees on a step.

        Incurs a CPU-GPU sync where the group's collectives run on a GPU.

        Args:
            step: The step's number.
            verdict: This rank's.
            position: The number of the step's frames before the first bad one.
            make_report: Makes this rank's report; called on one rank.
            make_offer: Makes what this rank says besides where one has a report.
            has_spike: This rank has seen a spike.
            wants_skip: A monitor of this rank wants to skip the step.

        Raises:
            RuntimeError: If the ranks are at different steps, or make_report() raised
                on another one.
        """
        with self._propagate():
            self._participants.notify()
        peers = self._meet()
        makers, wishes = (make_report, make_offer), (has_spike, wants_skip)
        return self._agree(peers, step, verdict, position, *makers, *wishes)

    def _agree(
        self,
        peers: Peers | None,
        step: int,
        verdict: Verdict,
        position: int,
        make_report: Callable[[], Report],
        make_offer: Callable[[], Any] = lambda: None,
        has_spike: bool = False,
        wants_skip: bool = False,
    ) -> Agreed:
        priority = 0
        if verdict.first is not None:
            priority = priority_of(verdict.first.kind, position)
        own_values = [priority, step, -step, int(has_spike), int(wants_skip)]
        worst, most, least, *wishes = self._maximum(peers, own_values)
        if most != -least:
            raise RuntimeError(
                "the ranks judge different steps, from "
                f"{-least} to {most}: each has to make the same optimizer steps"
            )
        if worst == 0:
            spike, skip = map(bool, wishes)
            return Agreed(None, has_spike=spike, wants_skip=skip)
        is_own = priority == worst
        own, error = attempted(
            is_own, lambda: dataclasses.replace(make_report(), where=self._where(peers))
        )
        ranks = [0] if peers is None else sorted(peers.ranks)
        gathered = dict(
            zip(ranks, self._gather(peers, (own, make_offer())), strict=True)
        )
        if error is not None:
            raise error
        rank = next(rank for rank in ranks if gathered[rank][0] is not None)
        offers = {each: offer for each, (_, offer) in gathered.items()}
        return Agreed(self._told(gathered[rank][0]), is_own, rank, offers)

    def act_on(self, is_own: bool, choose: Callable[[], Report]) -> Report:
        """The report with its action, chosen on the rank whose own it is.

        Args:
            is_own: Whether it is this rank's.
            choose: Chooses the action; called on that rank.

        Raises:
            RuntimeError: If choose() raised on another rank.
        """
        own, error = attempted(is_own, choose)
        gathered = self.gather(own)
        if error is not None:
            raise error
        return self._told(next(each for each in gathered if each is not None))

    def _told(self, found: Report | str) -> Report:
        """A rank's report; raises where it is the text of an error."""
        if isinstance(found, str):
            with self._propagate():
                raise RuntimeError(f"the rank that found it failed to decide: {found}")
        return found

    def all_agree(self, value: bool) -> bool:
        """Returns True if the value is True on all ranks, or they have no batch."""
        if not self.is_needed:
            return value
        is_against = not (value or self.is_shadowing)
        return self._maximum(self._meet(), [int(is_against)]) == [0]

    def gather(self, value: Any) -> list[Any]:
        """Gathers a value of each rank that shares the model."""
        return self._gather(self._meet(), value)

    # Collectives.

    def _meet(self) -> Peers | None:
        with self._propagate():
            return self._participants.meet()

    @contextlib.contextmanager
    def _propagate(self) -> Iterator[None]:
        """Notes an error of a collective, which the guard raises as it is."""
        try:
            yield
        except Exception as error:
            self.error = error
            raise

    def _maximum(self, peers: Peers | None, values: list[int]) -> list[int]:
        if peers is None:
            return values
        with self._propagate():
            return peers.maximum(values)

    def _gather(self, peers: Peers | None, value: Any) -> list[Any]:
        if peers is None:
            return [value]
        with self._propagate():
            return peers.gather(value)

    def _where(self, peers: Peers | None) -> str | None:
        if peers is None:
            return None
        rank, world = dist.get_rank(), dist.get_world_size()
        return str(Place(rank, world, socket.gethostname(), str(self._device())))

    def _device(self) -> torch.device:
        return self._watches[0].device or torch.device("cpu")
