"""The outcome of a replay of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ..core.modules import local_part
from ..torch_internals.tensor_internals import sparse_values
from .op_trace import OpTable
from .rank_coordinator import BAD, CLEAN, FAILED, GIVEN


@dataclass
class Outcome:
    """The outcome of a replay.

    Attributes:
        bad_outputs: What was returned and is non-finite; a loss comes first.
        bad_held: Whether the gradient that came from outside is non-finite.
        bad_gradients: The names of parameters whose gradients are non-finite.
        bad_buffers: Those of buffers that became non-finite.
        has_backward: Whether there was a backward.
        has_mask: Whether an output that is no loss has a -inf, which may be meant.
        bad_call: Which of the kept calls was the first bad one, or -1.
        gradients: The gradients of the parameters, by their names.
        table: The operations, if there was a table.
        modules: The modules' outputs that were bad, with their names, in order.
        error: What ended it, or None.
        seconds: The time that it took.
        bad_ranks: The ranks whose call was the first bad one.
        losses: What backward was called on, where that is a number.
        carried: What the replay has read of bad values that the step itself may have
            left, as in an attribute of a module. Known where there is a table.
    """

    bad_outputs: list[torch.Tensor] = field(default_factory=list)
    bad_held: bool = False
    bad_gradients: list[str] = field(default_factory=list)
    bad_buffers: list[str] = field(default_factory=list)
    has_backward: bool = False
    has_mask: bool = False
    bad_call: int = -1
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    table: OpTable | None = None
    modules: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    error: Exception | None = None
    seconds: float = 0.0
    bad_ranks: list[int] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Tells whether outputs, gradients and buffers are finite, on all ranks."""
        is_bad = self.bad_outputs or self.bad_gradients or self.bad_buffers
        return not (is_bad or self.bad_ranks or self.error)

    @property
    def state(self) -> int:
        """The state of this rank: CLEAN, GIVEN, BAD or FAILED."""
        if self.error is not None:
            return FAILED
        if not (self.bad_outputs or self.bad_gradients or self.bad_buffers):
            return CLEAN
        return GIVEN if self.bad_held and not self.is_forward else BAD

    @property
    def is_forward(self) -> bool:
        """Tells whether it was bad before a backward began."""
        return bool(self.bad_outputs)

    @property
    def is_in_gradients(self) -> bool:
        """Tells whether gradients alone are bad."""
        return not self.bad_outputs and bool(self.bad_gradients)


def gradients_of(models: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    """This rank's gradients by the names of parameters; of sparse ones, the values.

    Args:
        models: The models, by what their modules' names begin with.
    """
    found = {}
    for prefix, model in models.items():
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            gradient = local_part(parameter.grad)
            if gradient.layout is torch.sparse_coo:
                gradient = sparse_values(gradient)
            if gradient.layout is torch.strided:
                found[f"{prefix}{name}"] = gradient
    return found
