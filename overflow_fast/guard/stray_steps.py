"""Steps that bypass an optimizer hook: by a method or compiled code taken earlier."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..state.optimizer import OptimizerSnapshot
from ..torch_internals.module_internals import has_step_hooks

_Call = tuple[tuple[Any, ...], dict[str, Any]]


class StraySteps:
    """Judges steps that reach an optimizer without its `OptimizerHook`.

    Such a step cannot be left out. One of torch's optimizers does nothing without
    gradients, so these are hidden; for others a step that has to be skipped raises.

    Args:
        is_expected: Returns True if a step that begins comes through the hook.
        judge: Returns True if the step has to be skipped.
        on_stepped: Called after the step with True if it was skipped.
    """

    def __init__(
        self,
        is_expected: Callable[[], bool],
        judge: Callable[[], bool],
        on_stepped: Callable[[bool], None],
    ) -> None:
        self._is_expected = is_expected
        self._judge = judge
        self._on_stepped = on_stepped
        self._handles: list[RemovableHandle] = []
        self._is_running = False
        self._is_skipped = False
        self._snapshot: OptimizerSnapshot | None = None
        self._hidden: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def attach(self, optimizers: Iterable[Any]) -> None:
        """Registers the step hooks, which torch.compile does not compile."""
        disable: Any = torch.compiler.disable  # not at import: it imports torch._dynamo
        self._begin_unseen = disable(self._begin)
        self._end_unseen = disable(self._end)
        for optimizer in optimizers:
            if has_step_hooks(optimizer):
                self._handles += [
                    optimizer.register_step_pre_hook(self._before),
                    optimizer.register_step_post_hook(self._after),
                ]

    def detach(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # The hooks, small enough for torch.compile to turn them into constants.

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Call | None:
        if self._is_expected():
            return None
        return self._begin_unseen(optimizer, args, kwargs)  # type: ignore[no-any-return]

    def _after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._is_running:
            self._end_unseen()

    def _begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Call | None:
        if self._hidden:  # a subclass's step that calls the one that it overrides
            return None
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
        if not self._judge():
            return
        self._is_skipped = True
        is_torchs = type(optimizer).step.__module__.startswith("torch.optim.")
        if self._snapshot is not None or not is_torchs:
            if self._snapshot is not None:
                self._snapshot.restore()
            self._end()
            raise RuntimeError(
                f"The step of {type(optimizer).__name__} has to be skipped, but cannot "
                "be left out: the call came from a method or compiled code that was "
                "taken before the guard was made. No weight has changed. Call "
                "optimizer.step(), or make the guard first."
            )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._hidden = [(p, p.grad) for p in parameters]
        for parameter in parameters:
            parameter.grad = None

    def _end(self) -> None:
        self._is_running = False
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []
        self._snapshot = None
        self._on_stepped(self._is_skipped)
