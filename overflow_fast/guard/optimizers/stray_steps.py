"""Steps that bypass an optimizer hook: by a method or compiled code taken earlier."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from ...base.modules import Handles, stepped_by
from ...torch_internals.module_internals import has_step_hooks, step_pre_hooks
from ..undo.optimizer import OptimizerSnapshot
from .held_optimizers import has_torchs_step

Call = tuple[tuple[Any, ...], dict[str, Any]]


class StraySteps:
    """Judges steps that reach an optimizer without its `OptimizerHook`.

    Such a step cannot be left out. One of torch's optimizers does nothing without
    gradients, so these are hidden; for others a step that has to be skipped raises.

    Args:
        is_expected: Returns True if a step that begins comes through the hook.
        judge_behind: Judges a step that comes through the hook and has yet to be
            judged: returns its arguments, or None for the same; None for no such step.
        judge: Returns True if the step has to be skipped.
        on_stepped: Called after the step with True if it was skipped.
        on_judged: Called when the step has been judged.

    Attributes:
        is_judging: Such a step is being judged.
    """

    def __init__(
        self,
        is_expected: Callable[[], bool],
        judge_behind: Callable[[Optimizer], Callable[..., Call | None] | None],
        judge: Callable[[], bool],
        on_stepped: Callable[[bool], None],
        on_judged: Callable[[], None],
    ) -> None:
        self._is_expected = is_expected
        self._judge_behind = judge_behind
        self._judge = judge
        self._on_stepped = on_stepped
        self._on_judged = on_judged
        self.is_judging = self._is_attached = False
        self._handles = Handles()
        self._is_running = False
        self._is_skipped = False
        self._snapshot: OptimizerSnapshot | None = None
        self._hidden: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def attach(self, optimizers: Iterable[Any]) -> None:
        """Registers the step hooks, which torch.compile does not compile."""
        self._is_attached = True
        disable: Any = torch.compiler.disable  # not at import: it imports torch._dynamo
        self._begin_unseen = disable(self._begin)
        self._end_unseen = disable(self._end)
        for optimizer in optimizers:
            if has_step_hooks(optimizer):
                self._handles += [
                    optimizer.register_step_pre_hook(self._before),
                    optimizer.register_step_post_hook(self._after),
                ]

    def move_last(self) -> None:
        """Makes the pre-hooks the last ones: others may write to gradients."""
        for handle in self._handles:
            hooks = handle.hooks_dict_ref()
            if hooks and hooks.get(handle.id) == self._before:
                hooks[handle.id] = hooks.pop(handle.id)

    def detach(self) -> None:
        """Removes the hooks, at the end of the step whose gradients are hidden."""
        self._is_attached = False
        if not self._hidden:
            self._handles.remove_all()

    # The hooks, small enough for torch.compile to turn them into constants.

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | None:
        if self._is_expected():
            return None
        return self._begin_unseen(optimizer, args, kwargs)  # type: ignore[no-any-return]

    def _after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._is_running:
            self._end_unseen()

    def _begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | None:
        if self._hidden:  # a subclass's step that calls the one that it overrides
            return None
        judge_behind = self._judge_behind(optimizer)
        if judge_behind is not None:
            return judge_behind(args, kwargs)
        self._is_skipped = False
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._decide(optimizer)
            self._is_running = True
            return None

        if isinstance(optimizer, torch.optim.LBFGS):  # it moves weights meanwhile
            self._snapshot = OptimizerSnapshot(optimizer)

        def judged() -> Any:
            loss = closure()
            self._decide(optimizer)
            return loss

        self._is_running = True
        if len(args) > 1:
            return (args[0], judged, *args[2:]), kwargs
        return args, {**kwargs, "closure": judged}

    def _decide(self, optimizer: Optimizer) -> None:
        self.is_judging = True
        try:
            if self._judge():
                self._leave_out(optimizer)
        finally:
            self.is_judging = False
            self._on_judged()

    def _leave_out(self, optimizer: Optimizer) -> None:
        self._is_skipped = True
        if self._snapshot is not None or not has_torchs_step(optimizer):
            if self._snapshot is not None:
                self._snapshot.restore()
            self._end()
            raise RuntimeError(
                f"The step of {type(optimizer).__name__} has to be skipped, but cannot "
                "be left out: the call came from a method or compiled code that was "
                "taken before the guard was made. None of its weights has changed. "
                "Call optimizer.step(), or make the guard first."
            )
        parameters = stepped_by(optimizer)
        self._hidden = [(p, p.grad) for p in parameters]
        for parameter in parameters:
            parameter.grad = None

    def _end(self) -> None:
        self._is_running = False
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []
        self._snapshot = None
        if not self._is_attached:
            self._handles.remove_all()
        self._on_stepped(self._is_skipped)


def others_hooks(optimizer: Any) -> list[Any]:
    """The step pre-hooks of an optimizer that are no guard's."""
    hooks = step_pre_hooks(optimizer)
    return [e for e in hooks if type(getattr(e, "__self__", None)) is not StraySteps]
