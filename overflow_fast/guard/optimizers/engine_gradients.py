"""Gradients that are in no parameter's `grad` when an engine's step begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...base.tree import tensors
from .held_optimizers import vars_of


def engine_gradients(
    layers: Iterable[Any], names: dict[int, str]
) -> tuple[list[str], list[torch.Tensor]]:
    """Lists the gradients that an engine's optimizer keeps, with their names.

    Args:
        layers: The optimizer that the guard was given, and those inside of it.
        names: The names of the models' parameters, by identity.
    """
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for layer in layers:
        for attribute, parameters in _PARTITIONS.items():
            kept = vars_of(layer).get(attribute)
            owners = [vars_of(layer).get(each) for each in parameters]
            for path, tensor in () if kept is None else tensors(kept):
                keys = [part.value for part in path]
                stand = [_at(each, keys) for each in owners if each is not None]
                if stand and all(each is None for each in stand):
                    continue  # it fills a partition up, and is of no parameter
                name = next(filter(None, (names.get(id(p)) for p in stand)), None)
                if name is None:
                    name = attribute + "".join(f"[{key}]" for key in keys)
                found.setdefault(id(tensor), (name, tensor))
    return [name for name, _ in found.values()], [each for _, each in found.values()]


# By the attribute that keeps gradients, those that have their parameters: of ZeRO's
# stages 1 and 2, and 3; of BF16_Optimizer.
_PARTITIONS = {
    "averaged_gradients": ("params_in_partition", "fp16_groups"),
    "fp32_groups_gradients": ("bf16_groups",),
}


def _at(values: Any, keys: Sequence[Any]) -> Any:
    for key in keys:
        try:
            values = values[key]
        except Exception:
            return None
    return values
