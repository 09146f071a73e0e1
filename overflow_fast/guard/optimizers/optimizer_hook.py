"""Hooks an optimizer's `step`, so that it can be judged first, and skipped.

The flow:

1. `attach()` puts a function in the place of `step`, on the object whose `step` the
   training loop calls: the optimizer, or a wrapper or an engine's optimizer around it.
   `cover()` does so again where other code has set another one. `detach()` puts back
   what was there.
2. A call of that function comes to `_run()`. Without a closure the step is judged, and
   called if it is to be made: `engine_steps.py` leaves it out. With a closure, it is
   judged inside of it, after each evaluation, and left from there: `judged_closure.py`.
   One that may not evaluate it, or step before, is judged at its start, too.
3. Where other code has registered step pre-hooks, the step is called, and judged behind
   them: by a pre-hook of `stray_steps.py`, which is moved behind all others.
4. A step that was made, and may have overflowed although its gradients were finite, is
   judged once more, by what it has made, and undone if that is bad: `_is_undone()`.
5. The judge is told that the step was made or skipped. A skipped one does not reach the
   hooks of other guards, whose functions lie beneath: these are told, too.
6. A step that does not come through the function is judged by `stray_steps.py` alone.

The state of a call: `_is_running`, until it ends; `_waits`, until it is judged behind
pre-hooks; `_before` and `_doubted`, the snapshots to undo a step with a closure, and
one that may overflow. All else stays from step to step: `_closure_use`, what the last
one with a closure did with it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ... import _C
from ...base.source_files import drop_own_frames
from ..report.report import NonFiniteError
from ..undo.optimizer import OptimizerSnapshot
from .engine_scaler import LossScaler, engine_scaler
from .engine_steps import leave_out, overflow_flag, shape_of
from .found_inf import FoundInf
from .held_optimizers import optimizers_in
from .judged_closure import (
    ClosureUse,
    StepLeft,
    calls_closure_first,
    place_of_closure,
    run_until_left,
    with_judged_closure,
)
from .scaler_hook import scaler_of
from .stray_steps import Call, StraySteps, others_hooks
from .wrapped import innermost, stepper_of

_MAX_WRAPPED = 100  # a mock's attributes have no end


class StepJudge(Protocol):
    """Judges the steps of optimizers."""

    def before_step(self, hook: OptimizerHook) -> bool:
        """Judges a step before the optimizer touches a weight; True skips it.

        With a closure, after each evaluation of it.
        """

    def after_step(self, hook: OptimizerHook, is_skipped: bool) -> None:
        """Called after the step, which was made or skipped."""

    def step_raised(self, hook: OptimizerHook, error: Exception) -> None:
        """Called where the step, or its closure, has raised; raises nothing."""

    def kept_of_doubted(
        self, hook: OptimizerHook, before: OptimizerSnapshot | None
    ) -> OptimizerSnapshot | None:
        """The way to undo a step that may overflow though its gradients are finite."""

    def skips_update(self, hook: OptimizerHook, kept: OptimizerSnapshot) -> bool:
        """Judges what the step has made of weights and state; True undoes it.

        Args:
            hook: The optimizer's.
            kept: These as they were before the step.
        """

    def after_call(self) -> None:
        """Called at the end of the call, also of one that raises."""


def living(hooks: Sequence[OptimizerHook]) -> list[Optimizer]:
    """The optimizers of hooks that still exist."""
    found = [hook.optimizer for hook in hooks]
    return [optimizer for optimizer in found if optimizer is not None]


def outermost(hooks: Sequence[OptimizerHook]) -> list[Any]:
    """The optimizers that the user gave, wrappers of others among them."""
    found = (hook.layers[0] for hook in hooks)
    return [optimizer for optimizer in found if optimizer is not None]


# Steps of hooks. A scheduler's function around one has a copy of its attributes.
_own_steps: weakref.WeakSet[Any] = weakref.WeakSet()


class OptimizerHook:
    """Takes the place of one optimizer's `step` while it is attached.

    A skipped step calls nothing of the optimizer, and none of its step hooks. A step
    with a closure calls the closure, is judged, and is left from inside of the closure;
    changes that it has made by then are undone. Where other code has registered step
    pre-hooks, which may write to gradients, they are called, and the step is judged
    behind them; not that of an engine, which may call torch's several times.

    Args:
        optimizer: The optimizer, or a wrapper that has it as `optimizer`. It is held
            weakly.
        may_skip: The judge may skip the step or raise.
        models: The watched models as they train; an engine may step the optimizer.

    Attributes:
        found_inf: The flag with which the optimizer's kernels skip a step.
        is_skipped_elsewhere: Another guard has skipped the step that is judged.
        has_snapshot: A skip restores weights that the step has changed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        may_skip: bool,
        models: Iterable[nn.Module] = (),
    ) -> None:
        self._overflow_flag = overflow_flag(stepper_of(optimizer), optimizer, models)
        self._wrapper = weakref.ref(optimizer)
        self._stepper = weakref.ref(stepper_of(optimizer))
        self._optimizer = weakref.ref(innermost(optimizer))
        self._judge: StepJudge  # since it was attached
        self._may_skip = may_skip
        self._is_attached = False
        self._step: Any = None
        self._is_running = self._waits = False
        self._before: OptimizerSnapshot | None = None
        self._doubted: OptimizerSnapshot | None = None
        self._last: Any = None  # what the last step returned, without values
        self._closure_use = ClosureUse(self._stepper, self._optimizer)
        self._inner: list[weakref.ref[Any]] = []
        self._stray_steps = StraySteps(
            lambda: self._is_running and not self._waits,
            lambda each: self._judge_behind if self._waits_in(each) else None,
            self._judge_stray,
            self._end_stray,
            lambda: self._judge.after_call(),
        )
        self.found_inf = FoundInf(self._optimizer)
        self.is_skipped_elsewhere = False
        self.has_snapshot = False

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that has the parameters, or None if it is gone."""
        return self._optimizer()

    @property
    def is_running(self) -> bool:
        """True while a step is judged or made."""
        return self._is_running or self._stray_steps.is_judging

    @property
    def replaced(self) -> Any:
        """The function whose place it has taken, or None for the class's."""
        return None if self._step is None else self._step.replaced

    @property
    def layers(self) -> list[Any]:
        """The optimizer that the guard was given, and those inside of it."""
        return [self._wrapper(), self._stepper(), self._optimizer()]

    @property
    def all_layers(self) -> list[Any]:
        """The layers, and all optimizers that an engine's optimizer chains."""
        found = [*self.layers, *(each() for each in self._inner)]
        return list({id(each): each for each in found if each is not None}.values())

    @property
    def is_of_engine(self) -> bool:
        """True if the step is an engine's, which holds torch's optimizer."""
        return self._stepper() is not self._optimizer()

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scaler that skips the step at hand where it finds infs, or None."""
        running = scaler_of(self.layers)
        if running is not None or not self.is_of_engine:
            return running
        return engine_scaler(self.all_layers)

    def is_of(self, optimizer: object) -> bool:
        """Returns True if it hooks this optimizer, or this wrapper."""
        return any(optimizer is each for each in self.layers)

    def note_wrapper(self, wrapper: Any) -> None:
        """Notes a wrapper that was made after the hook, such as Accelerate's."""
        self._wrapper = weakref.ref(wrapper)

    def attach(self, judge: StepJudge) -> None:
        """Takes the place of `step`, unless it has it."""
        optimizer = self.optimizer
        if optimizer is None or self._is_attached:
            return
        self._is_attached, self._judge = True, judge
        _keep_uncompiled(OptimizerHook._run)
        inner = [each for _, each in optimizers_in(self._wrapper())]
        self._inner = [weakref.ref(each) for each in inner]
        self._stray_steps.attach(inner)
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
        if self._overflow_flag is not None:
            self._overflow_flag.drop()
        stepper: Any = self._stepper()
        is_there = stepper is not None and self._step is not None
        if is_there and vars(stepper).get("step") is self._step:
            replaced = self._step.replaced
            while replaced in _own_steps and not replaced.optimizer_hook._is_attached:
                replaced = replaced.replaced
            del vars(stepper)["step"]
            if replaced is not None:
                vars(stepper)["step"] = replaced
        self._step = None
        self.found_inf.drop()

    def notify_wrapper(self, is_skipped: bool) -> None:
        """Sets Accelerate's flags for a skipped step: its schedulers then pause."""
        wrapper: Any = self._wrapper()
        if hasattr(wrapper, "_is_overflow"):
            wrapper._is_overflow = is_skipped

    def judge_skipped_elsewhere(self) -> None:
        """Judges a step that another guard has skipped; nothing once it is detached."""
        if not self._is_attached:
            return
        self.is_skipped_elsewhere = True
        try:
            self._judge.before_step(self)
        finally:
            self.is_skipped_elsewhere = False
        self._judge.after_step(self, True)

    # The function in the place of `step`.

    def _make_step(self, stepper: Any, replaced: Any) -> Any:
        """Makes a function like `stepper.step`; it does not hold the optimizer."""
        reference = weakref.ref(stepper)
        original = stepper.step

        def unbound(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return self._run(replaced or _class_step(optimizer), args, kwargs)
            except NonFiniteError as error:
                drop_own_frames(error)
                raise error

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            try:
                return self._run(replaced or _class_step(reference()), args, kwargs)
            except NonFiniteError as error:
                drop_own_frames(error)
                raise error

        for each in (unbound, step):
            _keep_uncompiled(each)
            each.optimizer_hook = self  # type: ignore[attr-defined]
        function: Any = step
        function.__wrapped__ = getattr(original, "__func__", replaced)
        with contextlib.suppress(TypeError, ValueError):
            function.__signature__ = inspect.signature(original)
        function.__func__ = unbound  # schedulers wrap it as they wrap a method
        function.replaced = replaced
        _own_steps.add(function)
        return function

    def _run(
        self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._is_running or not self._is_attached:
            return step(*args, **kwargs)
        try:
            return self._run_judged(step, args, kwargs)
        finally:
            self._judge.after_call()

    def _run_judged(
        self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.found_inf.drop()  # of a step that raised
        self._is_running = True
        self._doubted = None  # of a step that raised
        result, is_skipped = None, False
        try:
            place = place_of_closure(step, args, kwargs)
            if place is not None:
                self._before = self._take_snapshot(step)
            if not self.is_of_engine and others_hooks(self._optimizer()):
                result, is_skipped = self._run_behind_hooks(step, args, kwargs)
            elif self._is_judged_first(place) and self.is_skipped():
                is_skipped = True
                self._tell_engine(is_skipped)
                whole = functools.partial(step, *args, **kwargs)
                result = leave_out(self._stepper(), whole, self._last)
            elif place is not None:
                args, kwargs = with_judged_closure(args, kwargs, place, self)
                result, is_skipped = run_until_left(
                    self, step, args, kwargs, lambda: self._before
                )
                self._last = shape_of(result)
            else:
                self._tell_engine(is_skipped)
                result = step(*args, **kwargs)
                self._last = shape_of(result)
        except Exception as error:
            _C.run_paused(self._judge.step_raised, self, error)
            raise
        finally:
            self._is_running = self.has_snapshot = self._waits = False
            self._before = None
            if self._closure_use.has_begun:
                _C.run_paused(self._closure_use.end)
            self.found_inf.drop()
        if self._doubted is not None:
            is_skipped = bool(_C.run_paused(self._is_undone))
        _C.run_paused(self._judge.after_step, self, is_skipped)
        if is_skipped:
            _C.run_paused(_judge_in_other_guards, step)
        return result

    def _run_behind_hooks(
        self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, bool]:
        """Calls the step, which is judged behind the pre-hooks of other code."""
        self._stray_steps.move_last()
        self._tell_engine(False)
        self._waits = True
        result, is_skipped = run_until_left(
            self, step, args, kwargs, lambda: self._before
        )
        if not is_skipped:
            self._last = shape_of(result)
        elif result is None:
            self._tell_engine(is_skipped)
            result = leave_out(self._stepper(), lambda: None, self._last)
        return result, is_skipped

    def _is_judged_first(self, place: int | str | None) -> bool:
        """True if a step is judged at its start; begins one that has a closure."""
        return place is None or bool(_C.run_paused(self._closure_use.begin))

    def _waits_in(self, optimizer: Optimizer) -> bool:
        return self._waits and optimizer is self._optimizer()

    def _judge_behind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | None:
        """Judges the step that waits, with the arguments that pre-hooks have left it.

        A closure is judged in the place of the step, or besides it.
        """
        self._waits = False
        place: int | str | None = "closure" if callable(kwargs.get("closure")) else 1
        if place == 1 and not (len(args) > 1 and callable(args[1])):
            place = None
        if self._is_judged_first(place) and self.is_skipped():
            raise StepLeft(self)
        if place is None:
            return None
        if self._before is None:  # a pre-hook has given it the closure
            self._before = self._take_snapshot(_class_step(self._stepper()))
        return with_judged_closure(args, kwargs, place, self)

    def _tell_engine(self, is_skipped: bool) -> None:
        if self._overflow_flag is not None:
            self._overflow_flag.set(is_skipped)

    def note_evaluation(self) -> None:
        """Notes that the step evaluates its closure: it may have changed weights."""
        self.has_snapshot = self._before is not None
        _C.run_paused(self._closure_use.note_evaluation)

    def is_skipped(self) -> bool:
        """Judges the step; returns True if it is to be skipped."""
        return bool(_C.run_paused(self._judge_step))

    def _judge_step(self) -> bool:
        """Judges the step; keeps what it may make non-finite all the same."""
        if self._judge.before_step(self):
            self._doubted = None
            return True
        if self._doubted is None:
            # With a closure there may be one from before its first evaluation.
            self._doubted = self._judge.kept_of_doubted(self, self._before)
        return False

    def _is_undone(self) -> bool:
        """Judges what a step has made of weights and state; undoes it if it is bad."""
        kept, self._doubted = self._doubted, None
        if kept is None:
            return False
        self.has_snapshot = kept.can_restore
        try:
            is_skipped = self._judge.skips_update(self, kept)
        except Exception:  # also an error of the policy's
            kept.restore()
            raise
        finally:
            self.has_snapshot = False
        if is_skipped:
            kept.restore()
        return is_skipped

    def _take_snapshot(self, step: Callable[..., Any]) -> OptimizerSnapshot | None:
        """Copies what a step may change before its closure has been judged."""
        stepper: Any = self._stepper()
        if not self._may_skip or calls_closure_first(stepper, step):
            return None
        with _C.Hidden():
            return OptimizerSnapshot(stepper)

    # A step that does not come through `_run`.

    def _judge_stray(self) -> bool:
        self.found_inf.drop()
        return self._judge.before_step(self)

    def _end_stray(self, is_skipped: bool) -> None:
        self.found_inf.drop()
        self._judge.after_step(self, is_skipped)


def _keep_uncompiled(function: Callable[..., Any]) -> None:
    """Excludes a function from torch.compile, but not the functions that it calls.

    Not at import: that would import torch._dynamo.
    """
    disable: Any = torch.compiler.disable
    disable(function, recursive=False)


def _judge_in_other_guards(step: Any) -> None:
    """Judges a skipped step in other guards, whose hooks it does not reach."""
    for _ in range(_MAX_WRAPPED):
        hook = getattr(step, "optimizer_hook", None)
        if isinstance(hook, OptimizerHook):  # a mock has any attribute
            hook.judge_skipped_elsewhere()
            step = getattr(step, "replaced", hook.replaced)  # also of a detached one
        else:
            step = getattr(step, "__wrapped__", None)


def _class_step(optimizer: Any) -> Callable[..., Any]:
    """The class's `step`, bound as Python binds it; a mock of it is not."""
    step: Any = inspect.getattr_static(type(optimizer), "step")
    bind = getattr(type(step), "__get__", None)
    bound: Callable[..., Any] = (
        step if bind is None else bind(step, optimizer, type(optimizer))
    )
    return bound
