"""Stands before an optimizer's step, and can make that step not happen."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

_Call = tuple[tuple[Any, ...], dict[str, Any]]


class OptimizerGate:
    """The hooks of a guard on one optimizer, off until `attach()`.

    Args:
        optimizer: The optimizer, or a wrapper that has it as `optimizer`. It is held
            weakly.
        judge: Called with this gate before the optimizer touches a weight, after each
            evaluation of a closure if there is one. Returns True to skip the step.
        on_stepped: Called with this gate when the step is over.
        may_skip: Whether `judge` may return True at all.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        judge: Callable[[OptimizerGate], bool],
        on_stepped: Callable[[OptimizerGate], None],
        may_skip: bool,
    ) -> None:
        self._wrapper = weakref.ref(optimizer)
        self._optimizer = weakref.ref(innermost(optimizer))
        self._judge = judge
        self._on_stepped = on_stepped
        self._may_skip = may_skip
        self._handles: list[RemovableHandle] = []
        self._undo: _Snapshot | None = None
        self._sets_found_inf = False
        self._versions: list[int] | None = None

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that has the parameters, or None if it is gone."""
        return self._optimizer()

    @property
    def skips_on_device(self) -> bool:
        """Whether the optimizer's kernels read `found_inf` themselves.

        So do torch's fused ones: torch/optim/{adam,adagrad,sgd}.py.
        """
        optimizer: Any = self.optimizer
        # Older Adagrads read it too and do not say so.
        if isinstance(optimizer, torch.optim.Adagrad) and optimizer.defaults["fused"]:
            return True
        return bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    def attach(self) -> None:
        """Puts the hooks on the optimizer, unless they are there."""
        optimizer = self.optimizer
        if optimizer is None or self._handles:
            return
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def detach(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._drop_found_inf()

    def tell_wrapper(self, is_skipped: bool) -> None:
        """Lets Accelerate's wrapper know, whose schedulers then stand still."""
        wrapper: Any = self._wrapper()
        if hasattr(wrapper, "_is_overflow"):
            wrapper._is_overflow = is_skipped
        if is_skipped and hasattr(wrapper, "_accelerate_step_called"):
            wrapper._accelerate_step_called = False  # what it asks under a scaler

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

    # The hooks.

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Call | None:
        self._drop_found_inf()  # of a step that raised
        self._undo = self._versions = None
        has_positional = len(args) > 1
        closure = args[1] if has_positional else kwargs.get("closure")
        if closure is None:
            try:
                if not self._judge(self):
                    return None
            except BaseException:
                self._drop_found_inf()
                raise
            self._versions = _versions(optimizer)
            return (_without_parameters(optimizer), *args[1:]), kwargs
        double = _double(optimizer)
        judged = self._judged(closure, optimizer, double)
        if has_positional:
            return (double, judged, *args[2:]), kwargs
        return (double, *args[1:]), {**kwargs, "closure": judged}

    def _judged(
        self, closure: Callable[[], Any], optimizer: Optimizer, double: Optimizer
    ) -> Callable[[], Any]:
        """A closure that judges what the user's has computed."""
        calls_it_first = _calls_closure_first(optimizer)
        needs_snapshot = self._may_skip and not calls_it_first
        snapshot = _Snapshot(optimizer) if needs_snapshot else None

        def judged_closure() -> Any:
            loss = closure()
            if self._judge(self):
                if snapshot is None:
                    double.__dict__ = _without_parameters(optimizer).__dict__
                else:
                    self._undo = snapshot
                    snapshot.hide_gradients()
            return loss

        return judged_closure

    def _after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._undo is not None:
            self._undo.restore()
            self._undo = None
        self._drop_found_inf()
        self._on_stepped(self)
        if self._versions not in (None, _versions(optimizer)):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was to be skipped, and changed "
                "weights all the same: it finds them by another way than its "
                "param_groups. Use on_overflow='raise' with it."
            )


def innermost(optimizer: Any) -> Optimizer:
    """The optimizer inside wrappers such as Accelerate's, which has the step hooks."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        optimizer = optimizer.optimizer
    return optimizer  # type: ignore[no-any-return]


def _double(optimizer: Optimizer) -> Optimizer:
    """Another object with the very same attributes."""
    double: Optimizer = object.__new__(type(optimizer))
    double.__dict__ = optimizer.__dict__
    return double


def _without_parameters(optimizer: Optimizer) -> Optimizer:
    """An optimizer like this one that has nothing to step on.

    A step hook cannot call off the step, but it can say on whom the step is called.
    What the step writes to itself or to its groups is lost with the double. So it is
    with optimizers that it has as attributes, as a Lookahead has.
    """
    double = _double(optimizer)
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    inner = {
        name: _without_parameters(value)
        for name, value in vars(optimizer).items()
        if isinstance(value, Optimizer)
    }
    double.__dict__ = {**vars(optimizer), **inner, "param_groups": groups}
    return double


def _versions(optimizer: Optimizer) -> list[int]:
    """How often each parameter was written to, as far as autograd notices."""
    return [p._version for group in optimizer.param_groups for p in group["params"]]


def _calls_closure_first(optimizer: Optimizer) -> bool:
    """Whether a step evaluates its closure once, before it touches anything.

    All of torch's do, but LBFGS; of others it is not known.
    """
    is_torchs = type(optimizer).step.__module__.startswith("torch.optim.")
    return is_torchs and not isinstance(optimizer, torch.optim.LBFGS)


class _Snapshot:
    """The weights and the state of an optimizer before a step that changes them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        groups = optimizer.param_groups
        self._parameters = [p for group in groups for p in group["params"]]
        self._values = [p.detach().clone() for p in self._parameters]
        self._gradients: list[torch.Tensor | None] = []
        self._state = {
            p: {key: _copied(value) for key, value in state.items()}
            for p, state in optimizer.state.items()
        }
        self._options = [
            {key: value for key, value in group.items() if key != "params"}
            for group in groups
        ]

    def hide_gradients(self) -> None:
        """Leaves the optimizer nothing to go on with: LBFGS stops where they are 0."""
        self._gradients = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def restore(self) -> None:
        """Puts everything back as it was."""
        with torch.no_grad():
            for parameter, value in zip(self._parameters, self._values, strict=True):
                parameter.copy_(value)
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, options in zip(
            self._optimizer.param_groups, self._options, strict=True
        ):
            group.update(options)


def _copied(value: Any) -> Any:
    with torch.no_grad():
        return copy.deepcopy(value)
