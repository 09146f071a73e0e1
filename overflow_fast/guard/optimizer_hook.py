"""Hooks an optimizer's `step`, so that it can be judged first, and skipped."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from .. import _C
from ..core.nested_optimizers import optimizers_in
from ..state.optimizer import OptimizerSnapshot
from .closures import calls_closure_first, place_of_closure, run_with_closure
from .found_inf import FoundInf
from .stray_steps import StraySteps
from .wrapped_optimizers import class_step, innermost, notify_wrapper, stepper_of

_MAX_WRAPPED = 100  # a mock's attributes have no end


class OptimizerHook:
    """Takes the place of one optimizer's `step` while it is attached.

    A skipped step calls nothing of the optimizer, and none of its step hooks. A step
    with a closure calls the closure, is judged, and is left from inside of the closure;
    changes that it has made by then are undone.

    Args:
        optimizer: The optimizer, or a wrapper that has it as `optimizer`. It is held
            weakly.
        judge: Called with this hook before the optimizer touches a weight, and after
            each evaluation of a closure if there is one. Returns True to skip the step.
        on_stepped: Called with this hook, and whether the step was skipped, after the
            step.
        may_skip: `judge` may return True or raise.

    Attributes:
        found_inf: The flag with which the optimizer's kernels skip a step.
        is_skipped_elsewhere: Another guard has skipped the step that is judged.
        has_snapshot: A skip restores weights that the step has changed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        judge: Callable[[OptimizerHook], bool],
        on_stepped: Callable[[OptimizerHook, bool], None],
        may_skip: bool,
    ) -> None:
        self._wrapper = weakref.ref(optimizer)
        self._stepper = weakref.ref(stepper_of(optimizer))
        self._optimizer = weakref.ref(innermost(optimizer))
        self._judge = judge
        self._on_stepped = on_stepped
        self._may_skip = may_skip
        self._is_attached = False
        self._step: Any = None
        self._is_running = False
        self._stray_steps = StraySteps(
            lambda: self._is_running, self._judge_stray, self._end_stray
        )
        self.found_inf = FoundInf(self._optimizer)
        self.is_skipped_elsewhere = False
        self.has_snapshot = False

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that has the parameters, or None if it is gone."""
        return self._optimizer()

    @property
    def replaced(self) -> Any:
        """The function whose place it has taken, or None for the class's."""
        return None if self._step is None else self._step.replaced

    @property
    def layers(self) -> list[Any]:
        """The optimizer that the guard was given, and those inside of it."""
        return [self._wrapper(), self._stepper(), self._optimizer()]

    def is_of(self, optimizer: object) -> bool:
        """Returns True if it hooks this optimizer, or this wrapper."""
        return any(optimizer is each for each in self.layers)

    def note_wrapper(self, wrapper: Any) -> None:
        """Notes a wrapper that was made after the hook, such as Accelerate's."""
        self._wrapper = weakref.ref(wrapper)

    def attach(self) -> None:
        """Takes the place of `step`, unless it has it."""
        optimizer = self.optimizer
        if optimizer is None or self._is_attached:
            return
        self._is_attached = True
        _keep_uncompiled(OptimizerHook._run)
        self._stray_steps.attach(each for _, each in optimizers_in(self._wrapper()))
        self.cover()

    def cover(self) -> None:
        """Takes the place of the present `step`, if it is attached and not there.

        Accelerate sets a new `step` each time that it has a GradScaler.
        """
        stepper: Any = self._stepper()
        if not self._is_attached or not hasattr(stepper, "__dict__"):
            return
        replaced = vars(stepper).get("step")
        if replaced is not self._step or replaced is None:
            step = self._make_step(stepper, replaced)
            # Not by setattr(): wrappers may hand that on to what they wrap.
            vars(stepper)["step"] = self._step = step

    def detach(self) -> None:
        """Puts the former `step` back.

        Where other code has wrapped it meanwhile, it passes calls on from now on.
        """
        self._is_attached = False
        self._stray_steps.detach()
        stepper: Any = self._stepper()
        is_there = stepper is not None and self._step is not None
        if is_there and vars(stepper).get("step") is self._step:
            replaced = self._step.replaced
            while (hook := _hook_of(replaced)) is not None and not hook._is_attached:
                replaced = replaced.replaced
            del vars(stepper)["step"]
            if replaced is not None:
                vars(stepper)["step"] = replaced
        self._step = None
        self.found_inf.drop()

    def notify_wrapper(self, is_skipped: bool) -> None:
        """Sets Accelerate's flag for a skipped step: its schedulers then pause."""
        notify_wrapper(self._wrapper(), is_skipped)

    def judge_skipped_elsewhere(self) -> None:
        """Judges a step that another guard has skipped."""
        self.is_skipped_elsewhere = True
        try:
            self._judge(self)
        finally:
            self.is_skipped_elsewhere = False
        self._on_stepped(self, True)

    # The function in the place of `step`.

    def _make_step(self, stepper: Any, replaced: Any) -> Any:
        """Makes a function like `stepper.step`; it does not hold the optimizer."""
        reference = weakref.ref(stepper)
        original = stepper.step

        def unbound(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            whole = replaced or class_step(optimizer)
            return self._run(whole, args, kwargs)

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            return unbound(reference(), *args, **kwargs)

        for each in (unbound, step):
            _keep_uncompiled(each)
            each.optimizer_hook = self  # type: ignore[attr-defined]
        function: Any = step
        function.__wrapped__ = getattr(original, "__func__", replaced)
        with contextlib.suppress(TypeError, ValueError):
            function.__signature__ = inspect.signature(original)
        function.__func__ = unbound  # schedulers wrap it as they wrap a method
        function.replaced = replaced
        return function

    def _run(
        self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._is_running or not self._is_attached:
            return step(*args, **kwargs)
        self.found_inf.drop()  # of a step that raised
        self._is_running = True
        result, is_skipped = None, False
        try:
            place = place_of_closure(step, args, kwargs)
            if place is not None:
                snapshot = self._take_snapshot(step)
                result, is_skipped = run_with_closure(
                    step, args, kwargs, place, self._is_skipped, snapshot
                )
            elif self._is_skipped():
                is_skipped = True
            else:
                result = step(*args, **kwargs)
        finally:
            self._is_running = self.has_snapshot = False
            self.found_inf.drop()
        _C.run_paused(self._on_stepped, self, is_skipped)
        if is_skipped:
            _C.run_paused(_judge_in_other_guards, step)
        return result

    def _is_skipped(self) -> bool:
        return bool(_C.run_paused(self._judge, self))

    def _take_snapshot(self, step: Callable[..., Any]) -> OptimizerSnapshot | None:
        """Copies what a step may change before its closure has been judged."""
        stepper: Any = self._stepper()
        if not self._may_skip or calls_closure_first(stepper, step):
            return None
        with _C.Hidden():
            snapshot = OptimizerSnapshot(stepper)
        self.has_snapshot = True
        return snapshot

    # A step that does not come through `_run`.

    def _judge_stray(self) -> bool:
        self.found_inf.drop()
        return self._judge(self)

    def _end_stray(self, is_skipped: bool) -> None:
        self.found_inf.drop()
        self._on_stepped(self, is_skipped)


def _keep_uncompiled(function: Callable[..., Any]) -> None:
    """Excludes a function from torch.compile, but not the functions that it calls.

    Not at import: that would import torch._dynamo.
    """
    disable: Any = torch.compiler.disable
    disable(function, recursive=False)


def _judge_in_other_guards(step: Any) -> None:
    """Judges a skipped step in other guards, whose hooks it does not reach."""
    for _ in range(_MAX_WRAPPED):
        hook = _hook_of(step)
        if hook is not None:
            hook.judge_skipped_elsewhere()
            step = hook.replaced
        else:
            step = getattr(step, "__wrapped__", None)


def _hook_of(step: Any) -> OptimizerHook | None:
    """The hook that a function leads through, or None; of a mock, too."""
    hook = getattr(step, "optimizer_hook", None)
    return hook if isinstance(hook, OptimizerHook) else None
