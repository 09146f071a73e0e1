"""Settings of optimizers that make weights non-finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch.optim import Optimizer

from ...base.tensors import is_number


class SettingRemark(str):
    """A sentence on a setting that is no finite number.

    Attributes:
        setting: The setting, in words.
        value: Its value.
    """

    setting: str
    value: float


def bad_settings(optimizers: Sequence[Optimizer]) -> list[SettingRemark]:
    """Lists the numbers in `param_groups` that are non-finite.

    Incurs a CPU-GPU sync for each setting that is a tensor on a device.
    """
    found = list[SettingRemark]()
    for optimizer in optimizers:
        for i, group in enumerate(optimizer.param_groups):
            of = f"of param_groups[{i}] of {type(optimizer).__name__}"
            for name, value in group.items():
                for number in () if name == "params" else _numbers(value):
                    if not math.isfinite(number):
                        found.append(_remark(name, number, of))
    return list(dict.fromkeys(found))


def _remark(name: str, number: float, of: str) -> SettingRemark:
    remark = SettingRemark(f"It may come from {name}={number} {of}.")
    remark.setting, remark.value = f"{name} {of}", number
    return remark


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, torch.Tensor) and value.numel() == 1:
        yield float(value.detach())
    elif is_number(value):
        yield float(value)
