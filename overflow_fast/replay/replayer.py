"""Runs a kept step again, and compares it with the step itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..capture.unseen import unseen
from ..core.modules import without_reduction
from ..core.tensors import loss_in
from ..state.snapshot import Snapshot
from ..torch_internals.replay_internals import no_dispatch
from .armed_call import armed
from .capture import KeptCall, loss_and_gradients, part_of
from .change import Change
from .outcome import Outcome, gradients_of
from .places import names_of
from .rank_coordinator import BAD, CLEAN, FAILED, NotJoined, OnRank, Run, Team
from .tensor_kinds import NEGATIVE_INF, bad_names, floats_in, kinds_of


class Rerun:
    """Runs kept calls again while the models' state is kept.

    Args:
        models: The models, by what their modules' names begin with.
        calls: What was kept.
        state: The kept state; it is entered.
        team: The ranks that run them.
        keeps_calls: Keep the arguments of operations that make bad values.

    Attributes:
        state: The kept state.
        num_forwards: How many forwards were run.
        watched: This rank's own change of runs that are watched, or None.
        on_output: Called with each call and what it returned, before its backward.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        calls: Sequence[KeptCall],
        state: Snapshot,
        team: Team,
        keeps_calls: bool = False,
    ) -> None:
        self.models, self.calls, self.team = models, list(calls), team
        self.state = state
        self._keeps_calls = keeps_calls
        self.watched: Change | None = None
        self.on_output: Callable[[KeptCall, Any], object] = lambda call, output: None
        self.num_forwards = 0
        self._written = {id(call) for call in calls if call.is_overwritten()}
        self._bad_before = set(bad_names(self._buffers(), masks=False))

    @property
    def returns_loss(self) -> bool:
        """Tells whether the calls compute the loss, and not only what it is made of."""
        return all(call.returns_loss for call in self.calls)

    def run(
        self,
        armed: int = -1,
        rows: Sequence[int] | None = None,
        change: Change | None = None,
        is_whole: bool = False,
        is_watched: bool = False,
    ) -> Outcome:
        """Runs calls from the state in which the step began, up to the first bad one.

        Called by the rank that leads; all others do the same.

        Args:
            armed: The place of the call that a table is made of; -1 for none.
            rows: The samples of that call's batch to run alone; None for all calls.
            change: See `Run`.
            is_whole: See `Run`.
            is_watched: See `Run`.
        """
        part = None if rows is None else tuple(rows)
        order = Run(armed, part, change, is_whole, is_watched)
        self.team.order(order)
        return self.follow(order)

    def follow(self, order: Run) -> Outcome:
        """Runs what the rank that leads has ordered; see `run()`."""
        outcome = Outcome()
        begin = time.perf_counter()
        try:
            is_over = False
            if self._tries_forwards(order):
                with self._prepared(order):
                    outcome = self._run_forwards(self._calls_of(order)[0])
                    is_over = not outcome.is_clean
            if not is_over:
                with self._prepared(order):
                    if order.is_whole:
                        outcome = self._run_all()
                    else:
                        outcome = self._run_in_order(*self._calls_of(order))
        except NotJoined:
            raise
        except Exception as error:
            outcome.error = error
        outcome.seconds = time.perf_counter() - begin
        return outcome

    @contextmanager
    def _prepared(self, order: Run) -> Iterator[None]:
        """Begins the step, out of sight of what watches it, with the run's changes."""
        self.state.begin()
        with ExitStack() as stack:
            stack.enter_context(unseen(self.models.values()))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(without_reduction(self.models.values()))
            watched = self.watched if order.is_watched else None
            for change in filter(None, (order.change, watched)):
                stack.enter_context(change.applied(self.models))
            yield

    def _tries_forwards(self, order: Run) -> bool:
        """True where models may call one another: all forwards come first."""
        calls, armed = self._calls_of(order)
        call_one_another = len({call.caller for call in calls}) > 1
        is_plain = armed < 0 and not order.is_whole
        return is_plain and call_one_another and self.team.is_alone

    def _run_forwards(self, calls: Sequence[KeptCall]) -> Outcome:
        """Runs forwards alone, up to the first bad one."""
        outcome = Outcome()
        for place, call in enumerate(calls):
            self._run_one(outcome, call, place, -1, has_backward=False)
            if not outcome.is_clean:
                outcome.bad_call = place
                break
        return outcome

    def _calls_of(self, order: Run) -> tuple[list[KeptCall], int]:
        """The calls to run, and the place of the armed one."""
        if order.rows is not None:
            return [part_of(self.calls[order.armed], order.rows)], 0
        last = len(self.calls) if order.armed < 0 else order.armed + 1
        calls = self.calls[:last]
        calls = calls if order.change is None else order.change.calls(calls)
        return calls, order.armed

    def _run_all(self) -> Outcome:
        """Runs all calls, each with its backward, whatever they have come to."""
        outcome = Outcome()
        for place, call in enumerate(self.calls):
            state = self._run_one(outcome, call, place, -1, stops=False)
            if state == FAILED:
                break
        return outcome

    def _run_in_order(self, calls: Sequence[KeptCall], armed: int) -> Outcome:
        """Runs calls up to the first bad one.

        One whose backward is given a bad gradient is passed over as long as there are
        others, one of which may have made that.
        """
        outcome, given = Outcome(), None
        for place, call in enumerate(calls):
            state = self._run_one(outcome, call, place, armed)
            if state == FAILED:
                return outcome
            if state == CLEAN:
                continue
            if armed not in (-1, place):
                outcome = Outcome()
                self.state.drop_gradients()
                continue
            outcome.bad_call = place
            if state == BAD:
                return outcome
            if given is None:
                given = outcome
            outcome = outcome if place + 1 == len(calls) else Outcome()
            self.state.drop_gradients()
        return given if given is not None and armed < 0 else outcome

    def _run_one(
        self,
        outcome: Outcome,
        call: KeptCall,
        place: int,
        armed: int,
        has_backward: bool = True,
        stops: bool = True,
    ) -> int:
        """Runs a call; returns the worst of what it has come to on any rank."""
        self.num_forwards += 1
        if id(call) in self._written:  # the user's batch is written to once
            call = call.with_own_batch()
        try:
            self._call(outcome, call, place == armed, has_backward, stops)
        except Exception as error:
            outcome.error = error
        state, text, outcome.bad_ranks = self.team.agree(outcome.state, outcome.error)
        if text and outcome.error is None:
            outcome.error = OnRank(text)
        return state

    def _call(
        self,
        outcome: Outcome,
        call: KeptCall,
        is_armed: bool,
        has_backward: bool,
        stops: bool,
    ) -> None:
        with ExitStack() as stack:
            if is_armed:
                stack.enter_context(
                    armed(outcome, call, self.models, self._keeps_calls)
                )
            with call.ambient.applied(self.models.values()):
                output = call.function(call.batch)
            self.on_output(call, output)
            roots = self._look_at(outcome, call, output)
            # Where there are others, they may wait for this rank's part in theirs.
            is_wanted = not (outcome.is_forward and stops and self.team.is_alone)
            if roots and has_backward and is_wanted:
                outcome.has_backward = True
                torch.autograd.backward(
                    [root for root, _ in roots], [gradient for _, gradient in roots]
                )
        self._look_at_state(outcome)

    def _look_at(
        self, outcome: Outcome, call: KeptCall, output: Any
    ) -> list[tuple[Any, Any]]:
        """Looks at what was returned; says what backward is called on."""
        with no_dispatch():
            roots, own = loss_and_gradients(call, output), loss_in(output)
            losses = [root for root, _ in roots]
            floats = floats_in(output)
            if call.returns_loss and losses:
                floats = losses  # what else it returned may be masked
            for tensor in floats:
                kinds = kinds_of(tensor)
                is_loss = call.returns_loss or tensor is own
                outcome.has_mask |= kinds == NEGATIVE_INF and not is_loss
                if kinds and (is_loss or kinds != NEGATIVE_INF):
                    outcome.bad_outputs.append(tensor)
            outcome.bad_held = any(kinds_of(gradient) for _, gradient in roots)
            outcome.losses += [root.detach() for root in losses if root.numel() == 1]
        return roots

    def _look_at_state(self, outcome: Outcome) -> None:
        outcome.gradients = gradients_of(self.models)
        outcome.bad_gradients = bad_names(outcome.gradients.items(), masks=True)
        bad = bad_names(self._buffers(), masks=False)
        outcome.bad_buffers = [name for name in bad if name not in self._bad_before]

    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        return [(n, t) for kind, n, t in names_of(self.models) if kind == "buffer"]


# A replay is compared with the step itself: the first value that differs.


@dataclass(frozen=True)
class Stats:
    """The extremes of an entry in a step.

    Attributes:
        num_tensors: How many tensors they are of.
        abs_min: The smallest magnitude; nan where there is a nan.
        abs_max: The largest magnitude; nan where there is a nan.
        num_nan: The number of nans.
        num_inf: The number of infs.
    """

    num_tensors: int
    abs_min: float
    abs_max: float
    num_nan: int
    num_inf: int


@dataclass(frozen=True)
class ReplayDifference:
    """The first entry, in execution order, whose extremes differ.

    Attributes:
        module: The name of its module.
        label: Its label, such as "output" or "grad_output".
        step: Its extremes in the step.
        replay: Those in the replay.
    """

    module: str
    label: str
    step: Stats
    replay: Stats

    def __str__(self) -> str:
        """The difference as a clause."""
        place = f"{self.label} of {self.module or 'the model'}"
        return f"{place} is the first that differs: {self._what()}"

    def _what(self) -> str:
        step, replay = self.step, self.replay
        for kind in ("nan", "inf"):
            numbers = (getattr(step, f"num_{kind}"), getattr(replay, f"num_{kind}"))
            if numbers[0] != numbers[1]:
                return f"{numbers[0]} {kind} in the step, {numbers[1]} in the replay"
        extreme = "smallest" if step.abs_max == replay.abs_max else "largest"
        name = "abs_min" if extreme == "smallest" else "abs_max"
        values = _apart(getattr(step, name), getattr(replay, name))
        return f"{extreme} magnitude {values[0]} in the step, {values[1]} in the replay"


def _apart(one: float, other: float) -> tuple[str, str]:
    """Writes two numbers with as many digits as tell them apart."""
    for digits in (3, 6, 9, 17):
        texts = f"{one:.{digits}g}", f"{other:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


class Witness(Change):
    """A change of a replay: it is watched as the step was. Changes no value."""

    def difference(self) -> ReplayDifference | None:
        """The first value that differs from the step's; None if none is known to."""
        raise NotImplementedError


def difference_of(watched: Change | None) -> ReplayDifference | None:
    """The first value of a watched run that differs from the step's, if one is known.

    Args:
        watched: What watched the run; None where nothing did.
    """
    return watched.difference() if isinstance(watched, Witness) else None
