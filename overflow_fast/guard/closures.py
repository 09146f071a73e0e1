"""Steps with a closure: judged inside of it, left from there if they are skipped."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from .. import _C
from ..state.optimizer import OptimizerSnapshot
from ..torch_internals.module_internals import num_step_hooks


class _StepLeft(BaseException):
    """Leaves an optimizer's step from inside of its closure."""

    def __init__(self, loss: Any, error: BaseException | None = None) -> None:
        self.loss = loss
        self.error = error


def run_with_closure(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    place: int | str,
    judge: Callable[[], bool],
    snapshot: OptimizerSnapshot | None,
) -> tuple[Any, bool]:
    """Calls an optimizer's step, and leaves it if `judge` says so behind the closure.

    Args:
        step: The step.
        args: Its arguments.
        kwargs: Its keyword arguments.
        place: The closure's index in `args`, or its name in `kwargs`.
        judge: Called after each evaluation of the closure; returns True to skip.
        snapshot: Restored if the step is left; None if it has changed nothing by then.

    Returns:
        The step's result, or the closure's if it was left, and whether it was.
    """
    closure = args[place] if isinstance(place, int) else kwargs[place]

    @functools.wraps(closure)
    def judged(*given: Any, **named: Any) -> Any:
        loss = closure(*given, **named)
        try:
            is_skipped = judge()
        except BaseException as error:
            raise _StepLeft(loss, error) from None
        if is_skipped:
            raise _StepLeft(loss)
        return loss

    if isinstance(place, int):
        args = (*args[:place], judged, *args[place + 1 :])
    else:
        kwargs = {**kwargs, place: judged}
    try:
        return step(*args, **kwargs), False
    except _StepLeft as left:
        if snapshot is not None:
            with _C.Hidden():
                snapshot.restore()
        if left.error is not None:
            raise left.error from None
        return left.loss, True


def place_of_closure(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int | str | None:
    """The place of a closure among a step's arguments: an index, a name, or None."""
    if callable(kwargs.get("closure")):
        return "closure"
    if not any(map(callable, args)):
        return None
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return 0 if callable(args[0]) else None
    for place, parameter in enumerate(parameters):
        is_any = parameter.kind is parameter.VAR_POSITIONAL
        if is_any or parameter.name == "closure":
            return place if place < len(args) and callable(args[place]) else None
    return None


def calls_closure_first(optimizer: Any, step: Any) -> bool:
    """Returns True if a step evaluates its closure once, before it changes anything.

    All of torch's optimizers do, but LBFGS; of others, and of step hooks, it is not
    known.
    """
    code = getattr(step, "__code__", None)
    is_wrapped = code is not None and "lr_scheduler" not in code.co_filename
    is_torchs = type(optimizer).step.__module__.startswith("torch.optim.")
    is_torchs = is_torchs and not is_wrapped
    has_hooks = num_step_hooks(optimizer) > 1  # one is the guard's
    return is_torchs and not has_hooks and not isinstance(optimizer, torch.optim.LBFGS)
