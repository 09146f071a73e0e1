"""The state that a step with a remedy leaves: the optimizer's, and buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ...base.tree import path_text, tensors
from ..bounds import BUFFER
from ..named_tensors import state_by_name
from ..optimizer_twin import OptimizerTwin, group_of
from ..replayer import ReplayResult
from ..tensor_kinds import is_float, kinds_of

# A gradient may make a state inf from this share of its dtype's largest root on: Adam
# keeps a tenth of a percent of the square.
_NEAR = 1e-3


def nonfinite_after(
    models: Mapping[str, nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    result: ReplayResult,
) -> str:
    """Names what an optimizer's step with some gradients makes non-finite, or "".

    Each step is made on a copy, of parameters alone whose gradients are that large.

    Args:
        models: The models, by what their modules' names begin with.
        optimizers: The optimizers.
        result: A replay, which has them.
    """
    named = state_by_name(models)
    for name, size in result.gradient_sizes.items():
        gradient = result.gradients[name]
        parameter = named.get(name)
        if parameter is None or gradient.dtype != parameter.dtype:
            continue  # a remedy has changed the dtype
        if gradient.shape != parameter.shape:
            continue
        limit = _NEAR * math.sqrt(torch.finfo(parameter.dtype).max)
        if size < limit:
            continue
        for optimizer in optimizers:
            place = group_of(optimizer, parameter)
            if place is not None:
                what = _stepped(optimizer, place, parameter, gradient)
                if what:
                    return f"{what} of {name} becomes inf in the optimizer's step"
    return ""


def _stepped(
    optimizer: torch.optim.Optimizer,
    place: int,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
) -> str:
    """The part of the state that a step makes non-finite, or the value, or ""."""
    group = optimizer.param_groups[place]
    twin = OptimizerTwin(optimizer, group, parameter, parameter.dtype, gradient)
    try:
        twin.step()
    except Exception:  # it steps all parameters together
        return ""
    state = [(path_text(path), each) for path, each in tensors(dict(twin.state))]
    for path, each in [("the value", twin.parameter.detach()), *state]:
        if is_float(each) and kinds_of(each):
            return path.strip("[]'\"")
    return ""


def grown_buffer(before: Mapping[str, float], result: ReplayResult) -> str:
    """Names the buffer that a replay has made far larger than before, or ""."""
    for name, size in result.buffer_sizes.items():
        if BUFFER.is_passed(size, before.get(name, size)):
            return f"{name} is {size:.3g} after it ({before[name]:.3g} before)"
    return ""
