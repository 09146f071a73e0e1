"""Remedies that change weights: smaller ones, or such as can be computed with."""

from __future__ import annotations

import re

import torch

from ...base.modules import module_of_parameter
from ...base.torch_ops import base_of, has
from ...guard.report.remedy import Remedy
from ..named_tensors import modules_by_name, names_of, pattern_of
from .failure import Failure
from .patches import OtherWeights, ScaledWeights
from .trials import Attempts, Trial, Trials

_FEW_NAMES = 4  # weights whose names are listed; of more a pattern is given


def smaller_trials(failure: Failure, trials: Trials) -> Attempts:
    """Smaller weights where results grow with each call, as another init gives them."""
    growth = failure.growth
    if growth is None:
        return
    names = [
        name
        for kind, name, tensor in names_of(trials.replayer.models)
        if kind == "parameter" and tensor.dim() > 1
        if module_of_parameter(name) in growth.modules
    ]
    if not names or len(trials.replayer.models) > 1:
        return
    factor = float(f"{0.95 / growth.factor:.2g}")
    weights = names[0] if len(names) == 1 else f"{len(names)} weights"
    remedy = Remedy(
        f"multiply {weights} by {factor:g}, as a smaller initialization does",
        _scaling_code(names, factor, trials),
    )
    yield Trial(remedy, ScaledWeights(dict.fromkeys(names, factor)))


def repair_trials(failure: Failure, trials: Trials) -> Attempts:
    """Other values for what a layer holds, and cannot be computed with."""
    module, op = failure.found.module, failure.found.op
    if op is None or len(trials.replayer.models) > 1:
        return
    zeros, modules = dict[str, torch.Tensor](), modules_by_name(trials.replayer.models)
    for kind, name, tensor in names_of(trials.replayer.models):
        owner, _, own = name.rpartition(".")
        value = tensor.detach()
        if "batch_norm" in op.name and owner == module and own == "running_var":
            text = f"set to 1, as in a new layer, the negative values of {name}"
            momentum = getattr(modules[owner], "momentum", None) or 0.0
            if 0 <= momentum <= 1:  # the layer's own updates leave none
                text += ", which other code has written and may write again"
            remedy, is_bad = Remedy(text, _NEGATIVE.format(name)), value < 0
            if bool(is_bad.any()):
                yield Trial(remedy, OtherWeights({name: value.masked_fill(is_bad, 1)}))
        # A parametrization is a module below what owns the weights.
        is_near = owner == module or module.startswith(f"{owner}.")
        if not is_near or not value.dim():
            continue
        is_zero = value.flatten(1).norm(dim=1) == 0 if value.dim() > 1 else value == 0
        if "weight_norm" in op.name and own in _DIRECTIONS and bool(is_zero.any()):
            text = f"fill rows of {name} that are 0 with small random numbers"
            remedy = Remedy(text, _ZERO_ROWS.format(name))
            yield Trial(remedy, OtherWeights({name: _filled(value, is_zero)}))
        if bool(is_zero.all()) and (kind == "buffer" or name.endswith(_SCALED)):
            zeros[name] = _filled(value, is_zero)
    scaled = [name for name in zeros if name.endswith(_SCALED)]
    if scaled and has(base_of(op.name), "divides"):
        remedy = Remedy(_ZERO.format(*scaled), _RANDOM.format([*zeros]))
        yield Trial(remedy, OtherWeights(zeros))


def _filled(value: torch.Tensor, is_zero: torch.Tensor) -> torch.Tensor:
    """A tensor with small random numbers in some rows."""
    value = value.clone()
    generator = torch.Generator().manual_seed(0)  # not the program's
    rows = torch.randn(value[is_zero].shape, generator=generator)
    value[is_zero] = 0.02 * rows.to(value)
    return value


_NEGATIVE = 'v = model.get_buffer("{}"); v[v < 0] = 1'
# Of both kinds of weight_norm, and of both of spectral_norm.
_DIRECTIONS, _SCALED = ("weight_v", "original1"), ("_orig", ".original")
_ZERO_ROWS = (
    'v = model.get_parameter("{}").data\n'
    "is_zero = v.flatten(1).norm(dim=1) == 0\n"
    "v[is_zero] = 0.02 * torch.randn_like(v[is_zero])"
)
_ZERO = "initialize {} with small random numbers when it is made, not with 0"
_RANDOM = "for name in {}: model.state_dict()[name].normal_(std=0.02)"


def _scaling_code(names: list[str], factor: float, trials: Trials) -> str:
    """The code that multiplies weights: by a pattern, where there are many."""
    pattern = "|".join(sorted({pattern_of(name) for name in names}))
    all_names = [name for _, name, _ in names_of(trials.replayer.models)]
    alike = [name for name in all_names if re.fullmatch(pattern, name)]
    if len(names) > _FEW_NAMES and sorted(alike) == sorted(names):
        return (
            "for name, weight in model.named_parameters():\n"
            f'    if re.fullmatch(r"{pattern}", name):\n'
            f"        weight.data.mul_({factor:g})"
        )
    scale = f".data.mul_({factor:g})"
    if len(names) == 1:
        return f'model.get_parameter("{names[0]}"){scale}'
    return f"for name in {names}: model.get_parameter(name){scale}"
