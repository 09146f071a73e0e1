"""Steps with a closure: judged inside of it, left from there if they are skipped."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from ... import _C
from ...base.modules import stepped_by
from ..undo.optimizer import OptimizerSnapshot
from .held_optimizers import has_torchs_step
from .stray_steps import Call, others_hooks


class SkipJudge(Protocol):
    """Judges a step, such as an `OptimizerHook`."""

    def note_evaluation(self) -> None:
        """Called when the step evaluates its closure."""

    def is_skipped(self) -> bool:
        """Judges the step; returns True if it is skipped."""


class ClosureUse:
    """The use that an optimizer makes of the gradients that its steps begin with.

    One that evaluates the closure before all else computes its gradients there, as all
    of torch's do. Any other uses those that it finds: SAM, which moves the weights and
    evaluates it there, or an optimizer that evaluates it in some steps. Which one it is
    shows in its last step.

    Args:
        find_stepper: Returns the object whose step it is; None if it is gone.
        find_optimizer: Returns the optimizer that has the parameters, likewise.

    Attributes:
        has_begun: A step runs that may be judged at its start.
    """

    def __init__(
        self,
        find_stepper: Callable[[], Any],
        find_optimizer: Callable[[], Optimizer | None],
    ) -> None:
        self._find_stepper, self._find_optimizer = find_stepper, find_optimizer
        self._use = _LATE
        self._versions: list[int] = []
        self._left: _C.Contents | None = None  # by the last step: that was judged
        self.has_begun = False

    def begin(self) -> bool:
        """Begins a step; True if it may use gradients that were not judged yet."""
        if has_torchs_step(self._find_stepper()):
            return False
        last, self._use = self._use, _NEVER
        self._versions, self.has_begun = _C.versions_of(self._parameters()), True
        gradient = self._gradient()
        if gradient is None or last == _FIRST:
            return last == _NEVER  # by its forwards, and the weights
        return self._left is None or not self._left.are_in(gradient)

    def note_evaluation(self) -> None:
        """Notes whether the step has written to weights by then."""
        if self._use == _NEVER:
            is_first = self._versions == _C.versions_of(self._parameters())
            self._use = _FIRST if is_first else _LATE

    def end(self) -> None:
        """Ends the step; what it leaves to the next one was judged."""
        gradient, self.has_begun = self._gradient(), False
        self._left = None if gradient is None else _C.Contents(gradient)

    def _gradient(self) -> torch.Tensor | None:
        grads = (each.grad for each in self._parameters())
        return next((each for each in grads if each is not None), None)

    def _parameters(self) -> list[torch.Tensor]:
        optimizer = self._find_optimizer()
        return [] if optimizer is None else stepped_by(optimizer)


# What a step has done with its closure.
_FIRST, _LATE, _NEVER = "evaluated first", "evaluated late", "not evaluated"


class StepLeft(BaseException):
    """Leaves an optimizer's step from inside of its closure, or of a pre-hook.

    Args:
        hook: Whose judgement it is; a step may be that of several guards.
        loss: What the closure has returned, or None.
        error: What the judgement has raised, or None.
    """

    def __init__(
        self,
        hook: SkipJudge,
        loss: Any = None,
        error: BaseException | None = None,
    ) -> None:
        self.hook = hook
        self.loss = loss
        self.error = error


def with_judged_closure(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    place: int | str,
    hook: SkipJudge,
) -> Call:
    """A step's arguments with a closure that is judged, and that leaves the step.

    Args:
        args: The arguments.
        kwargs: The keyword arguments.
        place: The closure's index in `args`, or its name in `kwargs`.
        hook: Judges the step after each evaluation of the closure.
    """
    closure = args[place] if isinstance(place, int) else kwargs[place]

    @functools.wraps(closure)
    def judged(*given: Any, **named: Any) -> Any:
        hook.note_evaluation()
        loss = closure(*given, **named)
        try:
            is_skipped = hook.is_skipped()
        except BaseException as error:
            raise StepLeft(hook, loss, error) from None
        if is_skipped:
            raise StepLeft(hook, loss)
        return loss

    if isinstance(place, int):
        return (*args[:place], judged, *args[place + 1 :]), kwargs
    return args, {**kwargs, place: judged}


def run_until_left(
    hook: SkipJudge,
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kept: Callable[[], OptimizerSnapshot | None],
) -> tuple[Any, bool]:
    """Calls an optimizer's step, which a judgement may leave.

    Args:
        hook: Whose judgement it is.
        step: The step.
        args: Its arguments.
        kwargs: Its keyword arguments.
        kept: Returns what is restored if the step is left; None if it has changed
            nothing by then.

    Returns:
        The step's result, or the closure's if it was left, and whether it was.
    """
    try:
        return step(*args, **kwargs), False
    except StepLeft as left:
        if left.hook is not hook:
            raise
        snapshot = kept()
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
    is_torchs = has_torchs_step(optimizer) and not is_wrapped
    has_hooks = bool(others_hooks(optimizer))
    return is_torchs and not has_hooks and not isinstance(optimizer, torch.optim.LBFGS)
