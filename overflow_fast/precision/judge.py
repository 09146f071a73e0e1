"""Which dtype each layer can take, by thresholds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .layers import DTYPES, FLOAT8, Layer, expected_error
from .precision_advice import LayerAdvice

HALF = ("float16", "bfloat16")
_OPERANDS = 2  # inputs and weights; float8 products do not return float8
_MOST_BITS = 120  # so that a scaled loss stays within float32


@dataclass(frozen=True)
class Thresholds:
    """From where on a layer cannot take a dtype; see `advise_precision`."""

    headroom_bits: float
    max_error: float
    max_float8_error: float
    max_underflow: float
    max_loss_difference: float
    max_gradient_difference: float


def loss_scale_of(layers: Iterable[Layer], bits: float) -> float | None:
    """The largest power of two whose scaled gradients keep headroom in float16.

    Args:
        layers: The layers; their gradients count.
        bits: The headroom to keep.

    Returns:
        The power of two, which may be below 1; None without gradients.
    """
    largest = max(
        (
            max(each.output_gradients.abs_max, each.weight_gradients.abs_max)
            for each in layers
        ),
        default=0.0,
    )
    if not largest:
        return None
    room = math.log2(torch.finfo(torch.float16).max / largest) - bits
    return 2.0 ** min(math.floor(room), _MOST_BITS)


class Judge:
    """Judges the layers of one run.

    Args:
        layers: The layers, in the order of their first calls.
        limits: The thresholds.

    Attributes:
        loss_scale: The safe loss scale for what can run in float16 but for its
            gradients; None without gradients.
    """

    def __init__(self, layers: list[Layer], limits: Thresholds) -> None:
        self._layers = layers
        self._limits = limits
        fit = [each for each in layers if not self._why_not_forward(each, "float16")]
        self.loss_scale = loss_scale_of(fit, limits.headroom_bits)

    def rows(self) -> list[LayerAdvice]:
        """The findings of each layer, and the dtypes that it can take."""
        return [self._row(each) for each in self._layers]

    def _row(self, layer: Layer) -> LayerAdvice:
        reasons = {name: self._why_not(layer, name) for name in DTYPES}
        scale = self.loss_scale or 1.0
        gradients = (layer.output_gradients, layer.weight_gradients)
        has_gradients = any(each.numel for each in gradients)
        return LayerAdvice(
            name=layer.name,
            class_name=layer.class_name,
            calls=layer.calls,
            abs_max={
                "input": layer.inputs.abs_max,
                "output": layer.outputs.abs_max,
                "weight": layer.weights.abs_max,
                "grad_output": layer.output_gradients.abs_max,
                "grad_weight": layer.weight_gradients.abs_max,
            },
            bits={name: _bits(layer, DTYPES[name]) for name in HALF},
            lost=layer.outputs.lost(),
            subnormal=layer.outputs.subnormal(),
            gradient_lost=max(g.lost() for g in gradients) if has_gradients else None,
            gradient_lost_scaled=(
                max(g.lost(scale) for g in gradients) if has_gradients else None
            ),
            gradient_subnormal_scaled=(
                max(g.subnormal(scale) for g in gradients) if has_gradients else None
            ),
            errors={name: each.relative for name, each in layer.errors.items()},
            ratios={name: _ratio(layer, name) for name in layer.errors},
            runs_in=[name for name, why in reasons.items() if not why],
            reasons={name: why for name, why in reasons.items() if why},
            not_compared=layer.not_compared,
            is_product=bool(layer.is_product),
        )

    def _why_not(self, layer: Layer, name: str) -> str:
        if name == "float8":
            return self._why_not_float8(layer)
        why = self._why_not_forward(layer, name)
        scale = self.loss_scale
        if why or name != "float16" or scale is None:
            return why
        for kind, gradients in (
            ("the gradients of its output", layer.output_gradients),
            ("the gradients of its weights", layer.weight_gradients),
        ):
            share = gradients.lost(scale)
            if share > self._limits.max_underflow:
                return (
                    f"{share:.0%} of {kind} become 0, even with a loss scale of "
                    f"{power_text(scale)}"
                )
        return ""

    def _why_not_forward(self, layer: Layer, name: str) -> str:
        """Why a layer's forward cannot run in half precision, or ''."""
        dtype = DTYPES[name]
        given = [("output", layer.outputs), ("input", layer.inputs)]
        given = [] if layer.has_inner else given  # of the layers within it
        for kind, found in [*given, ("weight", layer.weights)]:
            if found.has_nan:
                return f"{kind} has nan in float32"
            if found.abs_max > torch.finfo(dtype).max:
                return f"{kind} reaches {found.abs_max:.3g}, beyond {name}'s range"
            if found.bits(dtype) < self._limits.headroom_bits:
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
        return self._why_error(layer, name, self._limits.max_error)

    def _why_not_float8(self, layer: Layer) -> str:
        if layer.not_compared or not layer.is_product:
            return "no product of inputs and a matrix"
        if "float8" in layer.failures:
            return f"it raised {layer.failures['float8']}"
        return self._why_error(layer, "float8", self._limits.max_float8_error)

    def _why_error(self, layer: Layer, name: str, most: float) -> str:
        if name not in layer.errors or _ratio(layer, name) <= most:
            return ""
        error = layer.errors[name].relative
        if math.isinf(error):
            return "inf or nan inside, though inputs and output fit"
        return f"error {error:.2g}, {_ratio(layer, name):.0f} x what rounding explains"


def _ratio(layer: Layer, name: str) -> float:
    """The error of a layer, in multiples of what rounding explains."""
    dtype = DTYPES[name]
    count = _OPERANDS if dtype is FLOAT8 else layer.num_roundings
    return layer.errors[name].relative / expected_error(dtype, count)


def _bits(layer: Layer, dtype: torch.dtype) -> float:
    found = (layer.inputs, layer.outputs, layer.weights)
    return min(each.bits(dtype) for each in found)


def power_text(scale: float) -> str:
    """A power of two as text."""
    return f"2^{round(math.log2(scale))}"
