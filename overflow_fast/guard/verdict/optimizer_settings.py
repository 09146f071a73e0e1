"""Settings of optimizers that make weights non-finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ...base.tensors import is_number


class SettingRemark(str):
    """A sentence on a setting that is no finite number.

    Attributes:
        setting: The setting, in words.
    """

    setting: str


def bad_settings(optimizers: Sequence[Optimizer]) -> list[SettingRemark]:
    """Lists the numbers in `param_groups` that are non-finite.

    Incurs a CPU-GPU sync for each setting that is a tensor on a device.
    """
    found = list[SettingRemark]()
    for optimizer in optimizers:
        for i, group in enumerate(optimizer.param_groups):
            of = f"of param_groups[{i}] of {type(optimizer).__name__}"
            found += [_remark(*each, of) for each in nonfinite_in(group).items()]
    return list(dict.fromkeys(found))


def nonfinite_in(group: Mapping[str, Any]) -> dict[str, float]:
    """The settings of a parameter group that are non-finite, such as "betas[0]"."""
    found = {}
    for name, value in group.items():
        for place, number in () if name == "params" else _numbers(value, ""):
            if not math.isfinite(number):
                found[f"{name}{place}"] = number
    return found


def _remark(name: str, number: float, of: str) -> SettingRemark:
    remark = SettingRemark(f"It may come from {name}={number} {of}.")
    remark.setting = f"{name} {of}"
    return remark


def _numbers(value: Any, place: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, (list, tuple)):
        for i, each in enumerate(value):
            yield from _numbers(each, f"{place}[{i}]")
    elif isinstance(value, torch.Tensor) and value.numel() == 1:
        yield place, float(value.detach())
    elif is_number(value):
        yield place, float(value)
