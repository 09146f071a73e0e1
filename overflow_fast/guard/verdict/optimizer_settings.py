"""Settings of optimizers that make weights non-finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ...base.tensors import is_number
from ...base.text import dtype_name

# Settings that an optimizer adds to a root that may be 0, and divides by.
_EPS = ("eps", "epsilon")


class SettingRemark(str):
    """A sentence on a setting that is no finite number.

    Attributes:
        setting: The setting, in words.
        value: Its value.
    """

    setting: str
    value: float


def bad_settings(
    optimizers: Sequence[Optimizer], had_finite_gradients: bool = True
) -> list[str]:
    """Lists the settings in `param_groups` that can make weights non-finite.

    A number that is non-finite, and an epsilon that is 0 in the dtype of a group's
    parameters. The latter is listed only where the gradients of the step before were
    finite. Incurs a CPU-GPU sync for each setting that is a tensor on a device.
    """
    sentences: list[str] = []
    for optimizer in optimizers:
        for i, group in enumerate(optimizer.param_groups):
            of = f"of param_groups[{i}] of {type(optimizer).__name__}"
            sentences += _group_remarks(group, of, had_finite_gradients)
    return list(dict.fromkeys(sentences))


def _group_remarks(
    group: Mapping[str, Any], of: str, had_finite_gradients: bool
) -> Iterable[str]:
    for name, value in group.items():
        if name == "params":
            continue
        for number in _numbers(value):
            if not math.isfinite(number):
                remark = SettingRemark(f"It may come from {name}={number} {of}.")
                remark.setting, remark.value = f"{name} {of}", number
                yield remark
            elif name in _EPS and had_finite_gradients:
                for text in _vanishing(name, number, group["params"]):
                    yield f"{text} {of}."


def _vanishing(name: str, eps: float, parameters: Sequence[torch.Tensor]) -> list[str]:
    dtypes = dict.fromkeys(p.dtype for p in parameters if p.is_floating_point())
    return [
        f"It may come from {name}={eps:g}, which is 0 in {dtype_name(dtype)}, the dtype"
        for dtype in dtypes
        if float(torch.tensor(eps, dtype=dtype)) == 0
    ]


def _numbers(value: object) -> Iterable[float]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, torch.Tensor) and value.numel() == 1:
        yield float(value.detach())
    elif is_number(value):
        yield float(value)
