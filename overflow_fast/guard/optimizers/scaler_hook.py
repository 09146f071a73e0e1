"""Calls listeners when a GradScaler steps an optimizer, for which torch has no hook."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ...base.source_files import drop_own_frames
from ...torch_internals.needed import Needing
from ..report.report import NonFiniteError


class ScalerListener(Protocol):
    """Receives the steps of GradScalers."""

    def before_scaler_step(self, optimizer: Optimizer) -> None:
        """Called when a scaler's `step(optimizer)` begins."""

    def after_scaler_step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Called when it has returned."""


_running: dict[int, GradScaler] = {}
_replaced: dict[Any, Any] = {}  # the `step` that was there, by ours


def scaler_of(layers: Sequence[object]) -> GradScaler | None:
    """The enabled scaler whose `step()` of one of these is running, or None."""
    found = (_running.get(id(each)) for each in layers)
    return next((scaler for scaler in found if scaler is not None), None)


def listen(listener: ScalerListener) -> None:
    """Calls a listener at every GradScaler's steps from now on. Holds it weakly.

    `GradScaler` has no hooks: while there are listeners, its class has another `step`,
    which calls the former one.
    """
    _listeners.add(listener)
    step = vars(GradScaler)["step"]
    if step not in _replaced:
        GradScaler.step = _with_listeners(step)  # type: ignore[method-assign]
        _replaced[GradScaler.step] = step


def stop_listening(listener: ScalerListener) -> None:
    """Calls a listener no more; after the last one, puts the class's `step` back.

    Where other code has wrapped the method since, it stays, and only calls what it
    wraps.
    """
    _listeners.discard(listener)


def _put_back(may_wait: bool) -> None:
    original = _replaced.get(vars(GradScaler)["step"])
    if original is not None:
        _replaced.clear()
        GradScaler.step = original  # type: ignore[method-assign]


_listeners = Needing(_put_back)


def _with_listeners(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def step_with_listeners(
        self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        # A wrapper of ours, and ours in it, may both run for one step.
        if not self.is_enabled() or id(optimizer) in _running:
            return step(self, optimizer, *args, **kwargs)
        for listener in list(_listeners):
            listener.before_scaler_step(optimizer)
        _running[id(optimizer)] = self
        try:
            try:
                result = step(self, optimizer, *args, **kwargs)
            finally:
                del _running[id(optimizer)]
            for listener in list(_listeners):
                listener.after_scaler_step(optimizer, self)
        except NonFiniteError as error:
            drop_own_frames(error)
            raise error
        return result

    return step_with_listeners
