"""Steps that are left out, and what training engines need to be told of them.

An engine may skip a step by itself, or call torch's optimizer once for each group of
parameters, which may be copies. `leave_out()` and `shape_of()` are called for torch's
own optimizers, too. Without an engine they find nothing to do: a skipped step returns
None.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ...base.modules import has_base
from .held_optimizers import attribute_of, vars_of


class OverflowFlag:
    """The flag that DeepSpeed's engine reads where one of torch's optimizers skips.

    The engine, which pauses its schedule then, asks the optimizer for `overflow`, and
    so does Accelerate's wrapper. DeepSpeed's own optimizers have that attribute.

    Args:
        optimizer: The optimizer that the engine steps.
        wrapper: What the training loop has: the same, or Accelerate's wrapper.
    """

    def __init__(self, optimizer: Any, wrapper: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._wrapper = weakref.ref(wrapper)
        self._was_asked = vars_of(wrapper).get(_ASKS)

    def set(self, is_skipped: bool) -> None:
        """Sets the flag for one step."""
        vars_of(self._optimizer())["overflow"] = is_skipped
        if self._was_asked is not None:
            vars_of(self._wrapper())[_ASKS] = True

    def drop(self) -> None:
        """Removes the flag."""
        vars_of(self._optimizer()).pop("overflow", None)
        if self._was_asked is not None:
            vars_of(self._wrapper())[_ASKS] = self._was_asked


_ASKS = "__has_overflow__"


def overflow_flag(
    optimizer: Any, wrapper: Any, models: Iterable[Any]
) -> OverflowFlag | None:
    """Makes the flag of an optimizer that DeepSpeed's engine steps and that has none.

    Args:
        optimizer: The optimizer.
        wrapper: What the training loop has.
        models: The models as they train.
    """
    has_flag = attribute_of(optimizer, "overflow") is not None
    is_stepped = any(has_base(type(each), {"DeepSpeedEngine"}) for each in models)
    if has_flag or not is_stepped or not hasattr(optimizer, "__dict__"):
        return None
    return OverflowFlag(optimizer, wrapper)


def leave_out(optimizer: Any, step: Any, last: Any) -> Any:
    """Leaves out a step; returns what the step returns where it is skipped.

    For torch's own optimizers nothing has to be done. DeepSpeed's hold gradients that
    only a step of theirs lets go of: they skip it themselves, told that there was an
    overflow, and their scale stays.

    Args:
        optimizer: The optimizer whose step it is.
        step: Its `step`, without arguments.
        last: What its last step has returned, or None.
    """
    if callable(attribute_of(optimizer, "clear_hp_grads")):
        optimizer.clear_hp_grads()
        optimizer.clear_lp_grads()
    elif isinstance(vars_of(optimizer).get("averaged_gradients"), dict):
        with _overflown(optimizer):
            step()
    if isinstance(attribute_of(optimizer, "overflow"), bool):
        with contextlib.suppress(AttributeError):
            optimizer.overflow = True
    return _skipped_result(optimizer, last)


@contextlib.contextmanager
def _overflown(optimizer: Any) -> Iterator[None]:
    """Makes one of DeepSpeed's ZeRO optimizers find an overflow, and keep its scale."""

    def note(*args: Any, **kwargs: Any) -> bool:
        optimizer.overflow = True
        return True

    forced = {
        "check_grad_overflow": True,
        "check_overflow": note,
        "_update_scale": lambda *args: None,
    }
    if hasattr(optimizer, "_overflow_check_and_loss_scale_update"):
        forced["_overflow_check_and_loss_scale_update"] = note
    own = vars(optimizer)
    before = {name: own[name] for name in forced if name in own}
    own.update(forced)
    try:
        yield
    finally:
        for name in forced:
            own.pop(name, None)
        own.update(before)


def _skipped_result(optimizer: Any, last: Any) -> Any:
    """Finds the result of a skipped step.

    An optimizer's class says it by `skipped_step_result`. Megatron's is known. Any
    other step returns what its last one did, without its values: False for a bool, nan
    for a loss, else None.
    """
    known = getattr(type(optimizer), "skipped_step_result", _UNKNOWN)
    if known is not _UNKNOWN:
        return known
    if has_base(type(optimizer), {"MegatronOptimizer"}):
        return False, None, None
    return shape_of(last)


_UNKNOWN = object()


def shape_of(result: Any) -> Any:
    """A step's result without its values, for `leave_out()`; holds none of it."""
    if type(result) is tuple:
        return tuple(map(_without_value, result))
    return _without_value(result)


def _without_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return torch.tensor(torch.nan)
    return False if isinstance(value, bool) else None
