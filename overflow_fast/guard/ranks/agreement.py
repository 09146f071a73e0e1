"""Makes all ranks of a process group decide alike: one collective for each step.

1. `_find()` finds the process groups of this rank in models and optimizers, without a
   collective. Where it finds none, or the policy is to warn, the rank decides alone.
2. `_meet()`, at the first step, finds all ranks that these groups connect.
3. `agree()` is called by every rank in every judged step. One all-reduce takes the
   largest of each number: the priority of the bad value (0 for none), the step, its
   negative (so the least step is known, too: ranks that judge different steps raise),
   and what monitors wish.
4. Where no rank has found anything, that is all. Else the rank whose priority is the
   largest makes the report, and the ranks gather it. An error while it is made is
   gathered in its place, so that no rank waits for ever.
5. `act_on()`: the same rank chooses the action, and the ranks gather that.

The state:

- `_groups`: this rank's groups; None until they are looked for.
- `_peers`: the ranks that they connect; None until they have met.
- `error`: what a collective has raised last, which comes out as it is, unlike errors of
  the guard's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ...base.text import numbered
from ...torch_internals.module_internals import is_first, is_joining, is_shadowing
from ..process import own_rank, world_size
from ..report.report import Report
from ..verdict.verdict import Verdict
from ..watching.watch import ModelWatch, models_of
from .groups import find_groups, groups_of_mesh, shared
from .peers import Peers
from .rank_info import RankInfo

_log = logging.getLogger("overflow_fast")

# The rank with the earliest bad value decides: one that a collective of the training
# has mixed into a gradient is bad on every rank. Frames behind this one all count as
# late alike; so many ranks are told apart. A priority, about 2**50, fits an int64.
_LAST = 2**24
_SEVERITY = {"grad_output": 2, "gradient": 1, "optimizer_state": 1}


class Wishes(NamedTuple):
    """The wishes of a rank for a step that may be finite; or those of all together.

    Attributes:
        has_spike: A spike was seen.
        wants_skip: A monitor wants to skip the step.
        doubts: The step may overflow although its gradients are finite.
    """

    has_spike: bool = False
    wants_skip: bool = False
    doubts: bool = False


NO_WISHES = Wishes()


class Agreed(NamedTuple):
    """The agreement of ranks on a step.

    Attributes:
        report: The report that all ranks act on, or None if no rank has found anything.
        is_own: Whether it is this rank's own.
        rank: The rank whose it is.
        offers: What each rank has said along with its report, by rank.
        wishes: Those of all ranks, where there is no report.
    """

    report: Report | None
    is_own: bool = False
    rank: int = 0
    offers: dict[int, Any] = {}  # noqa: RUF012 - it is never written to
    wishes: Wishes = NO_WISHES


def priority_of(kind: str, position: int) -> int:
    """A number that is larger for an earlier bad value, then for a lower rank."""
    severity, earliness = _SEVERITY.get(kind, 3), max(0, _LAST - position)
    return (severity * (_LAST + 1) + earliness) * _LAST - own_rank()


def attempted(
    is_own: bool, make: Callable[[], Report]
) -> tuple[Report | str | None, Exception | None]:
    """Makes a report, or the text of an error: the other ranks wait for one of them."""
    if not is_own:
        return None, None
    try:
        return make(), None
    except Exception as error:
        return f"{type(error).__name__}: {error}", error


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
        optimizers: Returns the optimizers that step the models.
        outermost: Returns those that the user gave, such as an engine's, which may show
            process groups too.

    Attributes:
        error: The last error that a collective has raised, or None.
    """

    def __init__(
        self,
        process_group: Any,
        watches: Sequence[ModelWatch],
        may_act: bool,
        optimizers: Callable[[], Sequence[Optimizer]],
        outermost: Callable[[], Sequence[Any]],
    ) -> None:
        self._given = process_group
        self._watches = watches
        self._may_act = may_act
        self._optimizers = optimizers
        self._outermost = outermost
        self._groups: list[Any] | None = None
        self._peers: Peers | None = None
        self._has_warned = False
        self.error: Exception | None = None

    @property
    def is_needed(self) -> bool:
        """True if there are other ranks to agree with. Calls no collective."""
        acts = self._may_act or self._given is not None
        return acts and bool(self._shared) and not self._is_left_out()

    @property
    def is_apart(self) -> bool:
        """True if there are other ranks, and nothing shows which share the models."""
        return self._given is None and world_size() > 1 and not self._shared

    @property
    def is_shadowing(self) -> bool:
        """True if `Join` makes the step at hand for a rank that has no batch."""
        return world_size() > 1 and self.joins and is_shadowing()

    @property
    def joins(self) -> bool:
        """True if a `Join` has a model or an optimizer."""
        return any(map(is_joining, (*self._models(), *self._optimizers())))

    @property
    def _optimizers_join(self) -> bool:
        """True if `Join` steps the optimizers, which are judged then as usual."""
        optimizers = self._optimizers()
        return bool(optimizers) and all(map(is_joining, optimizers))

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
        wishes: Wishes = NO_WISHES,
    ) -> Agreed:
        """Agrees on a step.

        Incurs a CPU-GPU sync where the group's collectives run on a GPU.

        Args:
            step: The step's number.
            verdict: This rank's.
            position: The number of the step's frames before the first bad one.
            make_report: Makes this rank's report; called on one rank.
            make_offer: Makes what this rank says besides where one has a report.
            wishes: This rank's.

        Raises:
            RuntimeError: If the ranks are at different steps, or make_report() raised
                on another one.
        """
        peers = self._meet()
        makers = make_report, make_offer
        return self._agree(peers, step, verdict, position, *makers, wishes)

    def _agree(
        self,
        peers: Peers | None,
        step: int,
        verdict: Verdict,
        position: int,
        make_report: Callable[[], Report],
        make_offer: Callable[[], Any] = lambda: None,
        own_wishes: Wishes = NO_WISHES,
    ) -> Agreed:
        priority = 0
        if verdict.first is not None:
            priority = priority_of(verdict.first.kind, position)
        own_values = [priority, step, -step, *map(int, own_wishes)]
        worst, most, least, *wishes = self._maximum(peers, own_values)
        if most != -least:
            raise RuntimeError(
                "the ranks judge different steps, from "
                f"{-least} to {most}: each has to make the same optimizer steps"
            )
        if worst == 0:
            return Agreed(None, wishes=Wishes(*map(bool, wishes)))
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

    def gather(self, value: Any) -> list[Any]:
        """Gathers a value of each rank that shares the model."""
        return self._gather(self._meet(), value)

    # Collectives.

    def _meet(self) -> Peers | None:
        """Returns the ranks that share the models, or None; first by a collective."""
        with self._propagate():
            if self._peers is None and self._shared:
                self._peers = Peers.meet(self._shared)
                self._warn_of_others(self._peers.ranks)
        return self._peers

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
        rank, world = own_rank(), world_size()
        return str(RankInfo(rank, world, socket.gethostname(), str(self._device())))

    def _device(self) -> torch.device:
        return self._watches[0].device or torch.device("cpu")

    # The ranks that decide with this one, now and while ranks have no batch.

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
            return find_groups(self._models(), self._outermost())
        if isinstance(self._given, dist.device_mesh.DeviceMesh):
            return shared(groups_of_mesh(self._given))
        return shared([self._given])

    def _models(self) -> list[nn.Module]:
        return list(models_of(self._watches).values())

    def _warn_of_others(self, ranks: Sequence[int]) -> None:
        """Logs which ranks decide separately, unless the user has chosen them."""
        world = world_size()
        if self._given is not None or not self._may_act or max(len(ranks), 1) == world:
            return
        who = (
            f"{numbered('Rank', ranks)} of {world} decide together: the process groups "
            "of the model connect no others."
            if ranks
            else f"Rank {own_rank()} of {world} decides alone: the model shows no "
            "process group (DDP, FSDP, DTensor parameters), and raises where it should "
            "skip a step."
        )
        _log.warning(
            "%s If one rank raises or skips a step, other ranks may still make it. "
            "Pass process_group=torch.distributed.group.WORLD for all ranks to decide "
            "together, or process_group=False for each rank to decide alone.",
            who,
        )

    def _is_left_out(self) -> bool:
        """Returns True if a `Join` joins the training's collectives, but not ours."""
        is_model_there = any(map(is_joining, self._models()))
        is_left_out = is_model_there and not self._optimizers_join
        is_left_out |= any(map(is_first, self._optimizers()))
        if is_left_out and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "model.join() does not include the guard: each rank decides for itself "
                "from now on. Give all ranks as many steps for them to decide together."
            )
        return is_left_out
