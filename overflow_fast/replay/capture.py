"""Keeps the calls of a step, by reference, so that it can be run again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ..core.devices import devices_of
from ..state.step_start import StepStart
from ..torch_internals.compiler import compiled_call_of, has_compiled
from ..torch_internals.running import is_recorded
from ..tree import copied_call
from .functions import Captured
from .kept_call import Ambient, KeptCall, ModelCall

_MAX_KEPT = 8
COMPILED = "was compiled together with code around it, which hides its arguments"
GRAPH = "was captured in a CUDA graph, which runs no code that could be run again"


class Capture:
    """Keeps the calls of the watched models since the last judged step.

    Args:
        start: The models as they were when the step began.

    Attributes:
        start: The same.
        calls: The calls.
        num_dropped: How many were too many to be kept.
        hidden_by: Why forwards could not be kept, as the end of a sentence, or "".
        is_running: Whether a function runs that is kept as a whole.
        had_gradients: Whether gradients that may be bad were there before the step's
            first forward: no step before was judged, or that one was bad.
    """

    def __init__(self, start: StepStart) -> None:
        self.start = start
        self._devices: dict[int, tuple[torch.device | None, list[torch.device]]] = {}
        self.calls: list[KeptCall] = []
        self.num_dropped = 0
        self.hidden_by = ""
        self.is_running = False
        self.had_gradients = False
        self._doubts_gradients, self._is_bad = True, False
        self._open: KeptCall | None = None

    def begin(
        self, model: nn.Module, args: Any, kwargs: Any, has_stand_ins: bool = False
    ) -> None:
        """Keeps what an outermost forward is called with.

        Not tensors that stand in for the model's own weights, which may have its size.
        """
        if not torch.is_grad_enabled():
            return
        if self.is_running:
            return
        if args is None:
            self.hidden_by = COMPILED
            return
        if is_recorded() or self._is_captured(model):
            return
        self._look_for_gradients(model)
        ambient = Ambient(model, self._devices_of(model))
        batch = copied_call(args, kwargs)
        is_compiled, called = False, model
        if "torch._dynamo" in sys.modules and has_compiled():
            is_compiled, known = compiled_call_of(model)
            called = model if known is None else known
            is_compiled = is_compiled and known is None
        self._open = call = ModelCall.of(called, batch, ambient)
        call.is_part_of_compiled = is_compiled
        call.has_stand_ins = has_stand_ins
        call.follows_others = any(each.awaits_backward for each in self.calls)

    def end(self, output: Any) -> None:
        """Keeps the gradients that its output will get."""
        call, self._open = self._open, None
        if call is not None:
            call.hold_gradients(output)
            self._add(call)

    def run(
        self,
        model: nn.Module,
        function: Callable[[], Any],
        shield: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Any:
        """Calls a function that calls the model, and keeps it.

        Args:
            model: The model.
            function: The function.
            shield: Lets no error of the guard's own out.
        """
        call = None
        with shield():
            self._look_for_gradients(model)
            self.start.before_run()
            captured = Captured(function)
            ambient = Ambient(model, self._devices_of(model))
            call = KeptCall(captured, captured.values, ambient)
        was_running, self.is_running = self.is_running, True
        try:
            output = function()
        finally:
            self.is_running = was_running
        with shield():
            if call is not None and not was_running:
                call.hold_gradients(output)
                call.returns_loss = True
                self._add(call)
        return output

    def _add(self, call: KeptCall) -> None:
        self.calls.append(call)
        if len(self.calls) > _MAX_KEPT:
            del self.calls[0]
            self.num_dropped += 1

    def note_bad(self) -> None:
        """Notes that the step is bad: its gradients may stay for the next one."""
        self._is_bad = True

    def _look_for_gradients(self, model: nn.Module) -> None:
        if self._doubts_gradients and not self.calls:
            self.had_gradients = any(
                p.is_leaf and p.grad is not None for p in model.parameters()
            )

    def clear(self) -> None:
        """Lets go of what was kept: the step is judged."""
        self.calls.clear()
        self.had_gradients = False
        self._doubts_gradients, self._is_bad = self._is_bad, False
        self.start.end_judgement()
        self._open = None
        self.num_dropped = 0
        if self.hidden_by == COMPILED:
            self.hidden_by = ""

    def _is_captured(self, model: nn.Module) -> bool:
        """Tells whether a CUDA graph is being captured, whose replays call no hook."""
        has_device = any(each.type == "cuda" for each in self._devices_of(model))
        is_captured = has_device and torch.cuda.is_current_stream_capturing()
        if is_captured:
            self.hidden_by = GRAPH
        return is_captured

    def _devices_of(self, model: nn.Module) -> list[torch.device]:
        """The devices of a model, looked up again when its first parameter moves."""
        first = next(model.parameters(), None)
        device = None if first is None else first.device
        known = self._devices.get(id(model))
        if known is None or known[0] != device:
            known = self._devices[id(model)] = device, devices_of([model])
        return known[1]
