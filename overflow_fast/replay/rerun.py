"""Runs the forward and backward of a kept step again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..core.restore import KeptState
from ..recording.unseen import unseen
from ..torch_internals.replay_internals import no_dispatch
from .kept_call import KeptCall, loss_and_gradients
from .kinds import NEGATIVE_INF, bad_names, is_float, kinds_of, tensors_in
from .op_table import OpTable
from .places import ModuleStack, names_of
from .remedies.changes import Change
from .rows import Leaf


@dataclass
class Outcome:
    """What a replay has come to.

    Attributes:
        bad_outputs: What was returned and is non-finite; a loss comes first.
        bad_held: Whether the gradient that came from outside is non-finite.
        bad_gradients: The names of parameters whose gradients are non-finite.
        bad_buffers: Those of buffers that became non-finite.
        has_backward: Whether there was a backward.
        bad_call: Which of the kept calls was the first bad one, or -1.
        gradients: The gradients of the parameters, by their names.
        table: The operations, if there was a table.
        modules: The modules' outputs that were bad, with their names, in order.
        error: What ended it, or None.
        seconds: The time that it took.
        losses: What backward was called on, where that is a number.
    """

    bad_outputs: list[torch.Tensor] = field(default_factory=list)
    bad_held: bool = False
    bad_gradients: list[str] = field(default_factory=list)
    bad_buffers: list[str] = field(default_factory=list)
    has_backward: bool = False
    bad_call: int = -1
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    table: OpTable | None = None
    modules: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    error: Exception | None = None
    seconds: float = 0.0
    losses: list[torch.Tensor] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether outputs, gradients and buffers are finite."""
        return not (
            self.bad_outputs or self.bad_gradients or self.bad_buffers or self.error
        )

    @property
    def is_forward(self) -> bool:
        """Whether it was bad before a backward began."""
        return bool(self.bad_outputs)


class Rerun:
    """Runs kept calls again while the models' state is kept.

    Args:
        models: The models, by what their modules' names begin with.
        calls: What was kept.
        state: The kept state; it is entered.
        keeps_calls: Keep the arguments of operations that make bad values.

    Attributes:
        num_forwards: How many forwards were run.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        calls: Sequence[KeptCall],
        state: KeptState,
        keeps_calls: bool = False,
    ) -> None:
        self._keeps_calls = keeps_calls
        self.models = models
        self.calls = list(calls)
        self._state = state
        self.num_forwards = 0
        self._on_output: Callable[[KeptCall, Any], None] | None = None
        self._bad_before = set(bad_names(self._buffers(), masks=False))

    @property
    def returns_loss(self) -> bool:
        """Whether the calls compute the loss, and not only what it is made of."""
        return all(call.returns_loss for call in self.calls)

    def run(
        self,
        armed: int = -1,
        calls: Sequence[KeptCall] | None = None,
        change: Change | None = None,
        is_whole: bool = False,
        on_output: Callable[[KeptCall, Any], None] | None = None,
    ) -> Outcome:
        """Runs calls from the state in which the step began, up to the first bad one.

        Args:
            armed: The place of the call that a table is made of; -1 for none.
            calls: The calls; None for the kept ones.
            change: What is tried: it is entered around the calls.
            is_whole: Run all calls, each with its backward, as the step did.
            on_output: Called with each call and what it returned, before its backward.
        """
        outcome, self._on_output = Outcome(), on_output
        begin = time.perf_counter()
        calls = self.calls if calls is None else list(calls)
        last = len(calls) if armed < 0 else armed + 1
        try:
            with ExitStack() as stack:
                stack.enter_context(unseen(self.models.values()))
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.enable_grad())
                self._state.begin()
                if change is not None:
                    stack.enter_context(change.applied(self.models))
                if is_whole:
                    outcome = self._run_all(calls)
                else:
                    outcome = self._run_in_order(calls[:last], armed)
        except Exception as error:
            outcome.error = error
        outcome.seconds = time.perf_counter() - begin
        return outcome

    def _run_all(self, calls: Sequence[KeptCall]) -> Outcome:
        outcome = Outcome()
        for place, call in enumerate(calls):
            self._run_one(outcome, call, place, -1, stops=False)
        return outcome

    def _run_in_order(self, calls: Sequence[KeptCall], armed: int) -> Outcome:
        """Runs calls up to the first bad one.

        One whose backward is given a bad gradient is passed over as long as there are
        others, one of which may have made that.
        """
        outcome, given = Outcome(), None
        if armed < 0 and len({call.caller for call in calls}) > 1:
            for place, call in enumerate(calls):  # of models that call one another
                self._run_one(outcome, call, place, armed, has_backward=False)
                if not outcome.is_clean:
                    outcome.bad_call = place
                    return outcome
            self._state.begin()
        for place, call in enumerate(calls):
            self._run_one(outcome, call, place, armed)
            if outcome.is_clean:
                continue
            if armed not in (-1, place):
                outcome = Outcome()
                self._state.drop_gradients()
                continue
            outcome.bad_call = place
            if not outcome.bad_held or outcome.is_forward:
                return outcome
            if given is None:
                given = outcome
            outcome = outcome if place + 1 == len(calls) else Outcome()
            self._state.drop_gradients()
        return given if given is not None and armed < 0 else outcome

    def _run_one(
        self,
        outcome: Outcome,
        call: KeptCall,
        place: int,
        armed: int,
        has_backward: bool = True,
        stops: bool = True,
    ) -> None:
        self.num_forwards += 1
        with ExitStack() as stack:
            if place == armed:
                self._arm(outcome, call, stack)
            with call.ambient.applied(self.models.values()):
                output = call.function(call.batch)
            if self._on_output is not None:
                self._on_output(call, output)
            roots = self._look_at(outcome, call, output)
            goes_on = has_backward and not (stops and outcome.is_forward)
            if roots and goes_on:
                outcome.has_backward = True
                torch.autograd.backward(
                    [root for root, _ in roots], [gradient for _, gradient in roots]
                )
        self._look_at_state(outcome)

    def _arm(self, outcome: Outcome, call: KeptCall, stack: ExitStack) -> None:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        modules = ModuleStack(self.models, lambda *found: self._note(outcome, *found))
        leaves = [Leaf("batch", name, tensor) for name, tensor in call.leaves()]
        leaves += [Leaf(*found) for found in names_of(self.models)]
        leaves += [Leaf("gradient", "", held) for held in call.held.values()]
        outcome.table = OpTable(modules, leaves, self._keeps_calls)
        stack.enter_context(modules)
        stack.enter_context(outcome.table)

    def _note(self, outcome: Outcome, name: str, output: Any) -> None:
        """Notes what a module has returned, if it is bad."""
        table = outcome.table
        assert table is not None
        floats = [t for t in tensors_in(output) if is_float(t) and t.numel()]
        with no_dispatch():
            found = table.kinds.of(floats)
        for tensor, kinds in zip(floats, found, strict=True):
            if kinds & ~NEGATIVE_INF:
                outcome.modules.append((name, tensor))

    def _look_at(
        self, outcome: Outcome, call: KeptCall, output: Any
    ) -> list[tuple[Any, Any]]:
        """Looks at what was returned; says what backward is called on."""
        with no_dispatch():
            roots = loss_and_gradients(call, output)
            losses = [root for root, _ in roots]
            floats = [t for t in tensors_in(output) if is_float(t) and t.numel()]
            if call.returns_loss and losses:
                floats = losses  # what else it returned may be masked
            for tensor in floats:
                kinds = kinds_of(tensor)
                if kinds and (call.returns_loss or kinds != NEGATIVE_INF):
                    outcome.bad_outputs.append(tensor)
            outcome.bad_held = any(kinds_of(gradient) for _, gradient in roots)
            outcome.losses += [root.detach() for root in losses if root.numel() == 1]
        return roots

    def _look_at_state(self, outcome: Outcome) -> None:
        named = [
            (f"{prefix}{name}", parameter)
            for prefix, model in self.models.items()
            for name, parameter in model.named_parameters()
        ]
        gradients = {n: p.grad for n, p in named if p.grad is not None}
        plain = {n: g for n, g in gradients.items() if g.layout is torch.strided}
        outcome.gradients = plain
        outcome.bad_gradients = bad_names(plain.items(), masks=True)
        bad = bad_names(self._buffers(), masks=False)
        outcome.bad_buffers = [name for name in bad if name not in self._bad_before]

    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        return [(n, t) for kind, n, t in names_of(self.models) if kind == "buffer"]
