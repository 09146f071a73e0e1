"""A guard for DeepSpeed's engine, in one line."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..guard.guard import OverflowGuard


def guard_with(engine: nn.Module, **options: Any) -> OverflowGuard:
    """Makes a guard of DeepSpeed's engine and its optimizer.

    It judges a step where the engine is about to make it, at the boundary of gradient
    accumulation, before the engine looks for overflows. Its steps have the numbers of
    `engine.global_steps`. The ranks of the engine's process groups decide together.

    Args:
        engine: What `deepspeed.initialize()` returned.
        options: Those of `OverflowGuard`.

    Raises:
        TypeError: If it is no engine with an optimizer.
    """
    optimizer = getattr(engine, "optimizer", None)
    if not isinstance(engine, nn.Module) or optimizer is None:
        raise TypeError(
            "engine must be what deepspeed.initialize() returned, with an optimizer, "
            f"got {type(engine).__name__}"
        )
    guard = OverflowGuard(engine, optimizer, **options)
    guard.step = int(getattr(engine, "global_steps", 0))
    return guard
