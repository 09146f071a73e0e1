"""`explain()`: says why a model's step is not finite, without a guard."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..core.devices import devices_of
from ..core.model_call import step_of
from .explain import BUDGET, investigate
from .explanation import Explanation
from .kept_call import Ambient, KeptCall


def explain(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., torch.Tensor] | None = None,
    *,
    budget: int = BUDGET,
    checkpoints: Sequence[str | os.PathLike[str]] = (),
) -> Explanation:
    """Runs a step of a model and says which operation makes it non-finite, and why.

    Runs forward and backward; gradients, buffers and random states are put back bit for
    bit, and nothing is stepped. Incurs a CPU-GPU sync for each operation on a device.

    Args:
        model: The model.
        batch: What the model is called with: a tuple or list of arguments, a dict of
            keyword arguments, or the one argument.
        loss: Takes the batch, or the model and the batch, calls the model and returns
            what to call `backward()` on. None: the loss that the model returns.
        budget: How many forwards it may run to explain, and to try remedies.
        checkpoints: Files of weights (`torch.save`, safetensors), the newest last. If
            weights are bad, the step is tried with those that are finite.

    Returns:
        The explanation; its `cause` is "not reproducible" if the step is finite.

    Raises:
        TypeError: If the model or the loss cannot be used.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> found = explain(model, torch.zeros(1, 2), lambda x: model(x).sum().log())
        >>> found.phase
        'forward'
    """
    function = step_of(model, loss)
    call = KeptCall(function, batch, Ambient(model, devices_of([model])))
    call.returns_loss = loss is not None
    return investigate({"": model}, [call], budget=budget, checkpoints=checkpoints)
