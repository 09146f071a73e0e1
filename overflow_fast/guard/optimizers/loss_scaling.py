"""Leaves bad gradients to the loss scaler that skips their step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ..verdict.bad_frames import BadFrame
from .engine_scaler import ENGINES_SCALER, EngineScaler, LossScaler, has_scale
from .optimizer_hook import OptimizerHook
from .scaler_hook import scaler_of

SCALER = "GradScaler"


def without_expected(
    frames: Sequence[BadFrame],
    scaler: LossScaler | None,
    skips: Callable[[GradScaler], bool],
) -> tuple[list[BadFrame], str]:
    """Leaves out frames whose gradients are bad because a loss scaler scales them.

    Args:
        frames: A step's bad frames.
        scaler: The scaler that steps the optimizer, or None.
        skips: Returns True if it skips the step for them.

    Returns:
        The other frames, and the scaler's name if it skips the step, else "".
    """
    if scaler is None or not any(bad.is_gradient for bad in frames):
        return list(frames), ""
    if isinstance(scaler, EngineScaler):  # it looks at gradients in its step
        if not scaler.is_searching:
            return list(frames), ""
        left = without_gradients(frames)
        is_left = any(bad.is_gradient and not bad.is_backward for bad in frames)
        return left, ENGINES_SCALER if is_left and not left else ""
    if skips(scaler):
        return without_gradients(frames), SCALER
    return [bad for bad in frames if not bad.is_backward], ""


def unknown_scale_notes(
    hook: OptimizerHook | None, frames: Sequence[BadFrame]
) -> list[str]:
    """Notes that an engine may have scaled its gradients by a scale nobody knows.

    Args:
        hook: The hook of the optimizer that makes the step, or None.
        frames: The step's bad frames.
    """
    if hook is None or not hook.is_of_engine or not frames:
        return []
    are_gradients = all(bad.is_gradient for bad in frames)
    entries = [entry for bad in frames for entry in bad.bad_entries]
    if not are_gradients or not any(each.dtype == "float16" for each in entries):
        return []
    if scaler_of(hook.layers) is not None or has_scale(hook.all_layers):
        return []
    name = type(hook.layers[1]).__name__
    return [
        f"No loss scale was found in {name}. If it scales the loss by itself, the "
        "scale may be too large, and nothing else wrong. The guard reads the scale "
        "where an optimizer has the attributes `loss_scale` and `overflow`."
    ]


def is_scalers(skipped_by: str) -> bool:
    """True if what has skipped a step is a loss scaler."""
    return skipped_by in (SCALER, ENGINES_SCALER)


def without_gradients(frames: Sequence[BadFrame]) -> list[BadFrame]:
    """The frames that hold no gradient."""
    return [bad for bad in frames if not bad.is_gradient]


def will_skip(scaler: GradScaler, optimizer: Optimizer | None) -> bool:
    """Returns True if a scaler skips the step at hand. Incurs a CPU-GPU sync."""
    found_inf = getattr(optimizer, "found_inf", None)
    is_found = isinstance(found_inf, torch.Tensor) and bool(found_inf.item())
    return is_found and scaler.get_scale() > 1


def has_skipped(scaler: GradScaler) -> bool:
    """Returns True if a scaler, which has backed off since, skipped the last step."""
    return scaler.get_scale() / scaler.get_backoff_factor() > 1
