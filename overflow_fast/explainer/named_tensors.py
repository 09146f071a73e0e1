"""Modules, parameters and buffers of models by their qualified names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from ..base.modules import named_buffers, named_modules, named_parameters
from ..detector.selection import full_name


def modules_by_name(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Returns the modules of models by their qualified names."""
    return {
        full_name(prefix, name): module
        for prefix, model in models.items()
        for name, module in named_modules(model)
    }


def state_by_name(models: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    """Returns the parameters and buffers of models by their qualified names."""
    return {name: tensor for _, name, tensor in names_of(models)}


def names_of(models: Mapping[str, nn.Module]) -> list[tuple[str, str, torch.Tensor]]:
    """Lists kind, qualified name and tensor of each parameter and buffer, once."""
    found: list[tuple[str, str, torch.Tensor]] = []
    for prefix, model in models.items():
        parameters, buffers = named_parameters(model), named_buffers(model)
        found += [("parameter", f"{prefix}{name}", each) for name, each in parameters]
        found += [("buffer", f"{prefix}{name}", each) for name, each in buffers]
    return found


def pattern_of(name: str) -> str:
    """The regular expression of a weight's name, and its name in other layers."""
    return re.sub(r"\d+", r"\\d+", re.escape(name))


def partitions_of(
    named: Iterable[tuple[str, str, torch.Tensor]],
) -> list[tuple[str, str, torch.Tensor]]:
    """Lists what parameters hold in attributes, as `names_of()`: partitions of them.

    Such as those of ZeRO-3, from which an engine gathers the weights in each forward.
    """
    return [
        (kind, name, value)
        for kind, name, parameter in named
        for key, value in getattr(parameter, "__dict__", {}).items()
        if kind == "parameter" and isinstance(value, torch.Tensor) and "grad" not in key
    ]
