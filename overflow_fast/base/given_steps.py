"""How a step is given by hand: a model, a batch and a function that makes the loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .text import kind_of


def check_module(model: object, argument: str = "model") -> None:
    """Raises TypeError if an argument is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{argument} must be a torch.nn.Module, got {kind_of(model)}")


def step_of(
    model: nn.Module, loss: Callable[..., torch.Tensor] | None
) -> Callable[[Any], Any]:
    """Makes one function of a model and its loss, which takes the batch.

    Args:
        model: The model.
        loss: Takes the batch, or the model and the batch; None: the model is called.

    Raises:
        TypeError: If the model is no module, or the loss cannot be called.
    """
    check_module(model)
    if loss is None:
        return lambda batch: call_with(model, batch)
    if not callable(loss):
        raise TypeError(
            "loss must be a callable that takes the batch, or the model and the batch, "
            f"and returns a loss, got {type(loss).__name__}"
        )
    if _num_required(loss) >= 2:
        return lambda batch: loss(model, batch)
    return loss


def call_with(model: nn.Module, batch: Any) -> Any:
    """Calls a model; the items of a batch that is a mapping or list are arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _num_required(function: Callable[..., Any]) -> int:
    """The number of positional arguments that a function needs."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in parameters)
