"""Optimizers inside of wrappers: Accelerate's, Lightning's, loss scalers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

from ..core.nested_optimizers import optimizers_in
from ..torch_internals.module_internals import has_step_hooks

# A wrapper with one of these attributes decides by itself whether its optimizer steps:
# loss scalers, Accelerate's, Lightning's.
_DECIDES = ("scaler", "loss_scaler", "loss_scale", "cur_scale", "_strategy")


def innermost(optimizer: Any) -> Optimizer:
    """The optimizer inside wrappers such as Accelerate's, which has the step hooks.

    Raises:
        AttributeError: If there is none.
    """
    for _, each in optimizers_in(optimizer):
        if has_step_hooks(each):
            return each  # type: ignore[no-any-return]
    raise AttributeError(f"{type(optimizer).__name__} holds no torch.optim.Optimizer")


def stepper_of(optimizer: Any) -> Any:
    """The object whose `step` makes a step: the given optimizer, or a wrapped one.

    Where a wrapper decides whether its optimizer steps, it is that optimizer.
    """
    while hasattr(optimizer, "optimizer"):
        decides = any(hasattr(optimizer, name) for name in _DECIDES)
        if not decides and callable(getattr(optimizer, "step", None)):
            break
        optimizer = optimizer.optimizer
    return optimizer


def class_step(optimizer: Any) -> Callable[..., Any]:
    """The class's `step`, bound as Python binds it; a mock of it is not."""
    step: Any = inspect.getattr_static(type(optimizer), "step")
    bind = getattr(type(step), "__get__", None)
    bound: Callable[..., Any] = (
        step if bind is None else bind(step, optimizer, type(optimizer))
    )
    return bound


def notify_wrapper(wrapper: Any, is_skipped: bool) -> None:
    """Sets the flag with which Accelerate's wrapper pauses its schedulers."""
    if hasattr(wrapper, "_is_overflow"):
        wrapper._is_overflow = is_skipped


def optimizers_of(optimizer: Any) -> list[Optimizer]:
    """The optimizers of an argument that may be None, one, or several.

    Raises:
        TypeError: If one of them is no optimizer, and wraps none.
    """
    is_one = isinstance(optimizer, str) or not isinstance(optimizer, Iterable)
    several = [optimizer] if is_one or hasattr(optimizer, "step") else list(optimizer)
    several = [] if optimizer is None else several
    for each in several:
        try:
            innermost(each)
        except AttributeError:
            raise TypeError(
                "optimizer must be a torch.optim.Optimizer, a wrapper with one as its "
                f"`optimizer`, a list of them, or None, got {type(each).__name__}"
            ) from None
    return several
