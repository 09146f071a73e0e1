"""Stands before an optimizer's step, which a guard may call off."""

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
from ..torch_internals.module_internals import (
    has_step_hooks,
    num_step_hooks,
    reads_found_inf,
)
from .snapshot import OptimizerSnapshot
from .strays import StraySteps

# A wrapper that has one of these decides by itself whether its optimizer steps: loss
# scalers, Accelerate's, Lightning's.
_DECIDES = ("scaler", "loss_scaler", "loss_scale", "cur_scale", "_strategy")
_MAX_WRAPPED = 100  # a mock's attributes have no end


class OptimizerHook:
    """Takes the place of one optimizer's `step` while it is attached.

    A step that is called off calls nothing of the optimizer's, and none of its step
    hooks. With a closure, the closure is called, judged, and the step left from inside
    of it; what it had changed by then is put back.

    Args:
        optimizer: The optimizer, or a wrapper that has it as `optimizer`. It is held
            weakly.
        judge: Called with this gate before the optimizer touches a weight, after each
            evaluation of a closure if there is one. Returns True to skip the step.
        on_stepped: Called with this gate, and whether the step was skipped, when the
            step is over.
        may_call_off: Whether `judge` may return True or raise.

    Attributes:
        is_called_off: Whether another guard has called off the step that is judged.
        has_snapshot: Whether a skip puts back weights that the step has changed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        judge: Callable[[OptimizerHook], bool],
        on_stepped: Callable[[OptimizerHook, bool], None],
        may_call_off: bool,
    ) -> None:
        self._wrapper = weakref.ref(optimizer)
        self._stepper = weakref.ref(stepper_of(optimizer))
        self._optimizer = weakref.ref(innermost(optimizer))
        self._judge = judge
        self._on_stepped = on_stepped
        self._may_call_off = may_call_off
        self._is_attached = False
        self._step: Any = None
        self._is_running = False
        self._strays = StraySteps(
            lambda: self._is_running, self._judge_stray, self._end_stray
        )
        self.is_called_off = False
        self.has_snapshot = False
        self._sets_found_inf = False

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that has the parameters, or None if it is gone."""
        return self._optimizer()

    @property
    def behind(self) -> Any:
        """The function whose place it has taken, or None for the class's."""
        return None if self._step is None else self._step.replaced

    @property
    def layers(self) -> list[Any]:
        """The optimizer, and the wrappers of it, that it was given."""
        return [self._wrapper(), self._stepper(), self._optimizer()]

    def is_of(self, optimizer: object) -> bool:
        """Whether it stands before the step of this optimizer, or of this wrapper."""
        return any(optimizer is each for each in self.layers)

    @property
    def skips_on_device(self) -> bool:
        """Whether the optimizer's kernels read `found_inf` themselves.

        So do torch's fused ones: torch/optim/{adam,adagrad,sgd}.py.
        """
        optimizer: Any = self.optimizer
        # Older Adagrads read it too and do not say so.
        if isinstance(optimizer, torch.optim.Adagrad) and optimizer.defaults["fused"]:
            return True
        return reads_found_inf(optimizer)

    def attach(self) -> None:
        """Takes the place of `step`, unless it has it."""
        optimizer = self.optimizer
        if optimizer is None or self._is_attached:
            return
        self._is_attached = True
        _leave_alone(OptimizerHook._run)
        self._strays.attach(each for _, each in optimizers_in(self._wrapper()))
        self.cover()

    def cover(self) -> None:
        """Takes the place of what `step` is now, if it is attached and not there.

        Accelerate sets `step` anew each time that it has a GradScaler.
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
        """Gives `step` back what was there; where somebody has wrapped it, it passes
        calls on from now on."""
        self._is_attached = False
        self._strays.detach()
        stepper: Any = self._stepper()
        is_there = stepper is not None and self._step is not None
        if is_there and vars(stepper).get("step") is self._step:
            replaced = self._step.replaced
            while isinstance(gate := _gate_of(replaced), OptimizerHook):
                if gate._is_attached:
                    break
                replaced = replaced.replaced  # it is switched off
            del vars(stepper)["step"]
            if replaced is not None:
                vars(stepper)["step"] = replaced
        self._step = None
        self._drop_found_inf()

    def tell_wrapper(self, is_skipped: bool) -> None:
        """Lets Accelerate's wrapper know, whose schedulers then stand still."""
        wrapper: Any = self._wrapper()
        if hasattr(wrapper, "_is_overflow"):
            wrapper._is_overflow = is_skipped

    def set_found_inf(self, flag: torch.Tensor) -> None:
        """Has the optimizer's kernels skip this step where a flag on the device is 1.

        Where a GradScaler has set one, the larger counts. Does not incur a sync.
        """
        optimizer: Any = self.optimizer
        scalers = getattr(optimizer, "found_inf", None)
        if isinstance(scalers, torch.Tensor):
            flag = flag.to(scalers.device, non_blocking=True)
            torch.maximum(scalers, flag.to(scalers.dtype), out=scalers)
            return
        optimizer.found_inf = flag
        optimizer.grad_scale = None
        self._sets_found_inf = True

    def _drop_found_inf(self) -> None:
        if self._sets_found_inf:
            self._sets_found_inf = False
            for name in ("found_inf", "grad_scale"):
                vars(self.optimizer).pop(name, None)

    # What stands where `step` was.

    def _make_step(self, stepper: Any, replaced: Any) -> Any:
        """A function like `stepper.step`; it does not hold the optimizer."""
        reference = weakref.ref(stepper)
        original = stepper.step

        def unbound(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            whole = replaced or _class_step(optimizer)
            return self._run(whole, args, kwargs)

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            return unbound(reference(), *args, **kwargs)

        for each in (unbound, step):
            _leave_alone(each)
            each.gate = self  # type: ignore[attr-defined]
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
        self._drop_found_inf()  # of a step that raised
        self._is_running = True
        result, is_skipped = None, False
        try:
            place = _place_of_closure(step, args, kwargs)
            if place is not None:
                result, is_skipped = self._run_closure(step, args, kwargs, place)
            elif self._is_skipped():
                is_skipped = True
            else:
                result = step(*args, **kwargs)
        finally:
            self._is_running = self.has_snapshot = False
            self._drop_found_inf()
        _C.run_paused(self._on_stepped, self, is_skipped)
        if is_skipped:
            _C.run_paused(_tell_of_skip, step)
        return result

    def judge_called_off(self) -> None:
        """Judges a step that another guard has called off."""
        self.is_called_off = True
        try:
            self._judge(self)
        finally:
            self.is_called_off = False
        self._on_stepped(self, True)

    def _is_skipped(self) -> bool:
        return bool(_C.run_paused(self._judge, self))

    def _run_closure(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        place: int | str,
    ) -> tuple[Any, bool]:
        closure = args[place] if isinstance(place, int) else kwargs[place]
        stepper: Any = self._stepper()
        snapshot = None
        if self._may_call_off and not _calls_closure_first(stepper, step):
            with _C.Hidden():
                snapshot = OptimizerSnapshot(stepper)
        self.has_snapshot = snapshot is not None

        @functools.wraps(closure)
        def judged(*given: Any, **named: Any) -> Any:
            loss = closure(*given, **named)
            try:
                is_skipped = self._is_skipped()
            except BaseException as error:
                raise _CalledOff(loss, error) from None
            if is_skipped:
                raise _CalledOff(loss)
            return loss

        if isinstance(place, int):
            args = (*args[:place], judged, *args[place + 1 :])
        else:
            kwargs = {**kwargs, place: judged}
        try:
            return step(*args, **kwargs), False
        except _CalledOff as off:
            if snapshot is not None:
                with _C.Hidden():
                    snapshot.restore()
            if off.error is not None:
                raise off.error from None
            return off.loss, True

    # A step that comes another way.

    def _judge_stray(self) -> bool:
        self._drop_found_inf()
        return self._judge(self)

    def _end_stray(self, is_skipped: bool) -> None:
        self._drop_found_inf()
        self._on_stepped(self, is_skipped)


def _leave_alone(function: Callable[..., Any]) -> None:
    """Has torch.compile leave a function alone, but not what that calls.

    Not when this module is imported: that would import torch._dynamo.
    """
    disable: Any = torch.compiler.disable
    disable(function, recursive=False)


def _class_step(optimizer: Any) -> Callable[..., Any]:
    """The class's `step`, bound as Python binds it; a mock of it is not."""
    step: Any = inspect.getattr_static(type(optimizer), "step")
    bind = getattr(type(step), "__get__", None)
    bound: Callable[..., Any] = (
        step if bind is None else bind(step, optimizer, type(optimizer))
    )
    return bound


def _tell_of_skip(step: Any) -> None:
    """Has the gates of other guards judge, which a skipped step does not reach."""
    for _ in range(_MAX_WRAPPED):
        gate = _gate_of(step)
        if gate is not None:
            gate.judge_called_off()
            step = gate.behind
        else:
            step = getattr(step, "__wrapped__", None)


def _gate_of(step: Any) -> OptimizerHook | None:
    """The gate that a function leads through, or None; of a mock, too."""
    gate = getattr(step, "gate", None)
    return gate if isinstance(gate, OptimizerHook) else None


class _CalledOff(BaseException):
    """Leaves an optimizer's step from inside of its closure."""

    def __init__(self, loss: Any, error: BaseException | None = None) -> None:
        self.loss = loss
        self.error = error


def innermost(optimizer: Any) -> Optimizer:
    """The optimizer inside wrappers such as Accelerate's, which has the step hooks."""
    for _, each in optimizers_in(optimizer):
        if has_step_hooks(each):
            return each  # type: ignore[no-any-return]
    raise AttributeError(f"{type(optimizer).__name__} holds no torch.optim.Optimizer")


def stepper_of(optimizer: Any) -> Any:
    """The object whose `step` makes a step: the optimizer that was given, or wrapper.

    Where a wrapper decides whether its optimizer steps, it is that optimizer.
    """
    while hasattr(optimizer, "optimizer"):
        decides = any(hasattr(optimizer, name) for name in _DECIDES)
        if not decides and callable(getattr(optimizer, "step", None)):
            break
        optimizer = optimizer.optimizer
    return optimizer


def _place_of_closure(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int | str | None:
    """Where among the arguments a closure is, by its name; or None."""
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


def _calls_closure_first(optimizer: Any, step: Any) -> bool:
    """Whether a step evaluates its closure once, before it touches anything.

    All of torch's do, but LBFGS; of others, and of step hooks, it is not known.
    """
    code = getattr(step, "__code__", None)
    is_wrapped = code is not None and "lr_scheduler" not in code.co_filename
    is_torchs = type(optimizer).step.__module__.startswith("torch.optim.")
    is_torchs = is_torchs and not is_wrapped
    has_hooks = num_step_hooks(optimizer) > 1  # one is the gate's
    return is_torchs and not has_hooks and not isinstance(optimizer, torch.optim.LBFGS)
