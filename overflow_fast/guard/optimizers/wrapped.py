"""Finds torch's optimizers inside of wrappers: Accelerate's, Lightning's, engines'."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from ...base.text import kind_of
from ...torch_internals.module_internals import has_step_hooks
from .held_optimizers import optimizers_in

# A wrapper with one of these attributes has a GradScaler, or other code, step its
# optimizer: Accelerate's, Lightning's.
_DECIDES = ("scaler", "_strategy")


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

    An engine's optimizer, which may skip, or call torch's once for each group, is the
    one that the training loop steps. Where a GradScaler steps what a wrapper holds, it
    is what the wrapper holds.
    """
    while hasattr(optimizer, "optimizer"):
        decides = any(hasattr(optimizer, name) for name in _DECIDES)
        if not decides and callable(getattr(optimizer, "step", None)):
            break
        optimizer = optimizer.optimizer
    return optimizer


def _is_scheduler(value: Any) -> bool:
    """True for a scheduler of learning rates, which has an optimizer and a `step`."""
    return hasattr(value, "get_last_lr") and not hasattr(value, "param_groups")


def optimizers_of(optimizer: Any) -> list[Optimizer]:
    """The optimizers of an argument that may be None, one, or several.

    Raises:
        TypeError: If one of them is no optimizer, and wraps none.
    """
    is_one = isinstance(optimizer, str) or not isinstance(optimizer, Iterable)
    several = [optimizer] if is_one or hasattr(optimizer, "step") else list(optimizer)
    several = [] if optimizer is None else several
    for each in several:
        if _is_scheduler(each):
            raise TypeError(
                "optimizer must be a torch.optim.Optimizer, got the scheduler "
                f"{type(each).__name__}: give the optimizer whose learning rate it sets"
            )
        try:
            innermost(each)
        except AttributeError:
            raise TypeError(
                "optimizer must be a torch.optim.Optimizer, a wrapper with one as its "
                f"`optimizer`, a list of them, or None, got {kind_of(each)}"
            ) from None
    return several
