"""GradScalers: when one steps an optimizer, and when it skips the step itself."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ..verdict.verdict import BadFrame
from .found_inf import has_found_inf

SCALER = "GradScaler"


class ScalerListener(Protocol):
    """Receives the steps of GradScalers."""

    def before_scaler_step(self, optimizer: Optimizer) -> None:
        """Called when a scaler's `step(optimizer)` begins."""

    def after_scaler_step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Called when it has returned."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_running: dict[int, GradScaler] = {}
_replaced: dict[Any, Any] = {}  # the `step` that was there, by ours


def without_expected(
    frames: Sequence[BadFrame],
    scaler: GradScaler | None,
    skips: Callable[[GradScaler], bool],
) -> tuple[list[BadFrame], str]:
    """Leaves out frames whose gradients are bad because a GradScaler scales them.

    Args:
        frames: A step's bad frames.
        scaler: The scaler that steps the optimizer, or None.
        skips: Returns True if it skips the step for them.

    Returns:
        The other frames, and `SCALER` if the scaler skips the step, else "".
    """
    if scaler is None or not any(bad.is_gradient for bad in frames):
        return list(frames), ""
    if skips(scaler):
        return without_gradients(frames), SCALER
    return [bad for bad in frames if not bad.is_backward], ""


def without_gradients(frames: Sequence[BadFrame]) -> list[BadFrame]:
    """The frames that hold no gradient."""
    return [bad for bad in frames if not bad.is_gradient]


def will_skip(scaler: GradScaler, optimizer: Optimizer | None) -> bool:
    """Returns True if a scaler skips the step at hand. Incurs a CPU-GPU sync."""
    return has_found_inf(optimizer) and scaler.get_scale() > 1


def has_skipped(scaler: GradScaler) -> bool:
    """Returns True if a scaler, which has backed off since, skipped the last step."""
    return scaler.get_scale() / scaler.get_backoff_factor() > 1


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
    original = _replaced.get(vars(GradScaler)["step"])
    if original is not None and not _listeners:
        _replaced.clear()
        GradScaler.step = original  # type: ignore[method-assign]


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
            result = step(self, optimizer, *args, **kwargs)
        finally:
            del _running[id(optimizer)]
        for listener in list(_listeners):
            listener.after_scaler_step(optimizer, self)
        return result

    return step_with_listeners
