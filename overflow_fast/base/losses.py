"""The loss in what a model returned."""

from __future__ import annotations

from typing import Any

import torch

from .tree import INDEX, Part, children, tensors_in


def loss_in(output: Any) -> torch.Tensor | None:
    """Finds the loss in what a model returned: a floating-point scalar, or None.

    Runs none of the user's code: no property is evaluated, and of a dict or an object
    only what it holds counts. Never raises.
    """
    if type(output) is torch.Tensor:
        return output if _is_loss(output) else None
    try:
        return _loss_in(output)
    except Exception:
        return None


def _loss_in(output: Any) -> torch.Tensor | None:
    waiting, opened = [output], dict[int, Any]()
    for _ in range(_MOST_VALUES):
        if not waiting:
            break
        value = waiting.pop()
        if issubclass(type(value), torch.Tensor):
            if _is_loss(value):
                found: torch.Tensor = value
                return found
        elif id(value) not in opened:  # a list may hold itself
            opened[id(value)] = value
            parts = [each for part, each in children(value) or () if _may_be_loss(part)]
            waiting += reversed(parts)
    return None


def _is_loss(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 1 and tensor.is_floating_point()


def model_loss_in(output: Any) -> torch.Tensor | None:
    """The loss in what a model returned: a scalar that is no output beside others.

    One of a tuple or list, such as an auxiliary loss or the value of a state, is the
    loss only if it is computed from what was returned with it; [1, 1] is one sample's.
    """
    loss = loss_in(output)
    loss = None if loss is not None and loss is output and loss.dim() > 1 else loss
    if loss is None or loss.grad_fn is None or not isinstance(output, tuple | list):
        return loss
    from .graph import leads_to  # few models return a scalar among others

    beside = [each for each in tensors_in(output) if each is not loss]
    others = [each.grad_fn for each in beside if each.grad_fn is not None]
    return loss if not others or leads_to(loss.grad_fn, others) else None


def _may_be_loss(part: Part) -> bool:
    return part.style == INDEX or (type(part.value) is str and part.value == "loss")


_MOST_VALUES = 10_000  # that are looked through for a loss; chosen, not measured


def traced_loss_in(output: Any) -> Any:
    """Stands for `loss_in` where dynamo traces it, without running code to inspect it.

    Returns:
        The loss, or None.
    """
    if isinstance(output, torch.Tensor):
        is_number = output.numel() == 1 and output.dim() < 2
        return output if is_number and output.is_floating_point() else None
    if isinstance(output, (tuple, list)):
        for part in output:
            loss = traced_loss_in(part)
            if loss is not None:
                return loss
        return None
    if isinstance(output, dict):
        return traced_loss_in(output.get("loss"))
    if output is None or isinstance(getattr(type(output), "loss", None), property):
        return None
    # Not by getattr(): a `__getattr__` of the user's would run.
    own = getattr(output, "__dict__", None)
    return traced_loss_in(own.get("loss")) if own else None
