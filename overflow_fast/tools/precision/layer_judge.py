"""The judgement of each layer, by thresholds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...base.text import bits_left
from .layers import DTYPES, Layer

_MOST_BITS = 120  # so that a scaled loss stays within float32


@dataclass(frozen=True)
class Thresholds:
    """From where on a layer cannot take a dtype; see `advise_precision`."""

    headroom_bits: float
    max_error: float
    max_underflow: float
    max_loss_difference: float
    max_gradient_difference: float


def judge_layers(layers: Sequence[Layer], limits: Thresholds) -> float | None:
    """Finds which dtypes each layer cannot take, and gives it the `reasons`.

    Returns:
        The safe loss scale for what can run in float16 but for its gradients: the
        largest power of two, which may be below 1, that leaves them their headroom
        there. None without gradients.
    """
    for layer in layers:
        whys = {name: _why_not_forward(layer, name, limits) for name in DTYPES}
        layer.reasons = {name: why for name, why in whys.items() if why}
    fit = [each for each in layers if "float16" not in each.reasons]
    largest = max((m.abs_max for each in fit for m in each.gradients), default=0.0)
    if not largest:
        return None
    room = bits_left(torch.finfo(torch.float16).max, largest) - limits.headroom_bits
    scale = 2.0 ** min(math.floor(room), _MOST_BITS)
    for layer in layers:
        layer.gradient_lost = max(each.lost(scale) for each in layer.gradients)
        if layer.gradient_lost > limits.max_underflow:
            why = (
                f"{layer.gradient_lost:.0%} of its gradients become 0, even with a "
                f"loss scale of {power_text(scale)}"
            )
            layer.reasons.setdefault("float16", why)
    return scale


def _why_not_forward(layer: Layer, name: str, limits: Thresholds) -> str:
    """Why a layer's forward cannot run in half precision, or ''."""
    dtype = DTYPES[name]
    given = [("output", layer.outputs), ("input", layer.inputs)]
    given = [] if layer.has_inner else given  # of the layers within it
    for kind, found in [*given, ("weight", layer.weights)]:
        if found.has_nan:
            return f"{kind} has nan in float32"
        if found.abs_max > torch.finfo(dtype).max:
            return f"{kind} reaches {found.abs_max:.3g}, beyond {name}'s range"
        if found.bits(dtype) < limits.headroom_bits:
            return (
                f"{kind} reaches {found.abs_max:.3g}, {found.bits(dtype):.1f} bits "
                f"below the end of {name}"
            )
    if layer.is_random or layer.has_inner:
        return ""
    if layer.not_compared:
        return f"not compared: {layer.not_compared}"
    if name in layer.failures:
        return f"it raised {layer.failures[name]}"
    ratio = layer.ratios.get(name, 0.0)
    if ratio <= limits.max_error:
        return ""
    if math.isinf(ratio):
        return "inf or nan inside, though inputs and output fit"
    return f"error {layer.errors[name]:.2g}, {ratio:.0f} x what rounding explains"


def power_text(scale: float) -> str:
    """A power of two as text."""
    return f"2^{round(math.log2(scale))}"
