"""A step of an optimizer on a copy of one parameter and of its state."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..guard.undo.kept_objects import ATOMS
from ..torch_internals.replaying import with_torch_function


def group_of(optimizer: Any, parameter: torch.Tensor) -> int | None:
    """The place of the parameter group that has a parameter, or None."""
    for place, group in enumerate(optimizer.param_groups):
        if any(parameter is each for each in group["params"]):
            return place
    return None


class OptimizerTwin:
    """An optimizer of the same kind and state for a copy of one parameter.

    Args:
        optimizer: The optimizer.
        group: The settings of the parameter's group.
        parameter: The parameter; values that are not finite are 0 in the copy.
        dtype: The dtype of the copies.
        gradient: The gradient to step with; None for 0.
        held: Returns what a tensor held before a step that is to be made again; None
            where that is not known.

    Attributes:
        parameter: The copy.
    """

    def __init__(
        self,
        optimizer: Any,
        group: dict[str, Any],
        parameter: torch.Tensor,
        dtype: torch.dtype,
        gradient: torch.Tensor | None = None,
        held: Callable[[torch.Tensor], torch.Tensor | None] = lambda _: None,
    ) -> None:
        before = held(parameter)
        value = (parameter.detach() if before is None else before).to(dtype, copy=True)
        value[~value.isfinite()] = 0
        self.parameter = nn.Parameter(value)
        given = torch.zeros_like(value) if gradient is None else gradient
        self.parameter.grad = given.to(dtype, copy=True)
        self._optimizer = copy.copy(optimizer)  # of which torch keeps no attributes
        own = {k: v for k, v in vars(optimizer).items() if type(v) in ATOMS}
        vars(self._optimizer).update(own)
        kept = dict(optimizer.state.get(parameter, {}))
        if before is not None:
            # State of which nothing is held was made in that step.
            old = {key: held(each) for key, each in kept.items() if _is_tensor(each)}
            known = {key: each for key, each in old.items() if each is not None}
            kept = {**kept, **known} if known or not old else {}
        state = {k: _copied(v, parameter.dtype, dtype) for k, v in kept.items()}
        settings = {key: each for key, each in group.items() if key != "params"}
        self._optimizer.param_groups = [{**settings, "params": [self.parameter]}]
        self._optimizer.state = defaultdict(dict, {self.parameter: state})

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state for the copy."""
        found: dict[str, Any] = self._optimizer.state[self.parameter]
        return found

    def step(self) -> None:
        """Makes the class's own step, without hooks."""
        step: Any = type(self._optimizer).step
        with torch.no_grad(), with_torch_function():  # which is off in hooks of ours
            getattr(step, "__wrapped__", step)(self._optimizer)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _copied(value: Any, old: torch.dtype, new: torch.dtype) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(new, copy=True) if value.dtype == old else value.clone()
