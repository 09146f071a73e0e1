"""Knows when a GradScaler steps an optimizer, and when it skips the step itself."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ..verdict.verdict import BadFrame

SCALER = "GradScaler"


class ScalerListener(Protocol):
    """Who wants to know of GradScalers."""

    def before_scaler_step(self, optimizer: Optimizer) -> None:
        """A scaler's `step(optimizer)` begins."""

    def after_scaler_step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """It has returned."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_running: dict[int, GradScaler] = {}
_replaced: dict[Any, Any] = {}  # what was there before our `step`, by that


def without_scalers(
    frames: Sequence[BadFrame], has_found_inf: bool
) -> tuple[list[BadFrame], str]:
    """Leaves out what is a GradScaler's business; says whether it skips the step."""
    if has_found_inf:
        return [bad for bad in frames if not bad.is_gradient], SCALER
    return [bad for bad in frames if not bad.is_backward], ""


def scaler_of(layers: Sequence[object]) -> GradScaler | None:
    """The enabled scaler whose `step()` of one of these is running, or None."""
    found = (_running.get(id(each)) for each in layers)
    return next((scaler for scaler in found if scaler is not None), None)


def listen(listener: ScalerListener) -> None:
    """Tells a listener of every GradScaler's steps from now on. Holds it weakly.

    `GradScaler` has no hooks: while anyone listens, its class has another `step`, which
    calls the one that was there.
    """
    _listeners.add(listener)
    step = vars(GradScaler)["step"]
    if step not in _replaced:
        GradScaler.step = _heard(step)  # type: ignore[method-assign]
        _replaced[GradScaler.step] = step


def stop_listening(listener: ScalerListener) -> None:
    """Tells a listener no more; the last one gives the class back what was there.

    Where somebody has wrapped the method since, it stays, and only calls what it wraps.
    """
    _listeners.discard(listener)
    original = _replaced.get(vars(GradScaler)["step"])
    if original is not None and not _listeners:
        _replaced.clear()
        GradScaler.step = original  # type: ignore[method-assign]


def _heard(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def heard_step(
        self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        # One that somebody has wrapped may run within another one.
        if not self.is_enabled() or id(optimizer) in _running:
            return step(self, optimizer, *args, **kwargs)
        for listener in list(_listeners):
            listener.before_scaler_step(optimizer)
        _running[id(optimizer)] = self
        try:
            result = step(self, optimizer, *args, **kwargs)
        finally:
            del _running[id(optimizer)]
        for listener in list(_listeners):
            listener.after_scaler_step(optimizer, self)
        return result

    return heard_step


def has_found_inf(optimizer: Optimizer | None) -> bool:
    """Whether a scaler told a fused optimizer to skip. Incurs a CPU-GPU sync."""
    found_inf = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, torch.Tensor) and bool(found_inf.item())
