"""Measures each layer in a float32 run, and computes it again in narrower dtypes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...base.modules import Handles, class_name_of, named_modules
from ...base.tensors import devices_of
from ...base.text import dtype_name, error_line
from ...base.tree import NotRebuilt
from ...explainer.tensor_kinds import floats_in
from ...guard.undo.random import RandomStates
from ...precision.keep_in_fp32 import Float32Forward, has_forward
from ...torch_internals.module_internals import own_parameters
from ...torch_internals.running import graph_task_id
from .again import LayerCall, RelativeDifference, copied_given
from .magnitudes import Magnitudes

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_NOISE = 0.18  # of one rounding, in squares of the unit roundoff


def expected_error(dtype: torch.dtype, num_roundings: int) -> float:
    """The relative L2 error that independent roundings to a dtype explain.

    sqrt(0.18 n) u, with u half of the dtype's epsilon: the noise of rounding to a
    floating-point number has 0.180 u^2 of the power of what is rounded (B. Widrow and
    I. Kollar, Quantization Noise, 2008, chapter 12), and n independent ones add up.

    Args:
        dtype: The dtype that is rounded to.
        num_roundings: How many of inputs, weights and output are rounded.
    """
    return math.sqrt(_NOISE * num_roundings) * torch.finfo(dtype).eps / 2


@dataclass(eq=False)
class Layer:
    """A module as the float32 run found it, and the dtypes that it can take.

    Attributes:
        name: Its qualified name.
        class_name: Its class.
        calls: How often the batches called it.
        inputs: Magnitudes of the floats it was given.
        outputs: Magnitudes of the floats it returned.
        weights: Magnitudes of its own parameters.
        output_gradients: Magnitudes of the gradients of what it returned.
        weight_gradients: Magnitudes of the gradients of its own parameters.
        differences: Its differences to float32 alone, in a dtype, with the same inputs.
        failures: What it raised in a dtype.
        not_compared: Why it has no errors, or ''.
        is_random: Whether it draws random numbers.
        has_inner: Whether it calls other modules, which are layers of their own.
        reasons: Why it cannot run in a dtype, by its name, where it cannot.
        gradient_lost: The share of the gradients of its outputs or its weights,
            whichever is larger, that are not 0, and that float16 makes 0 with the
            largest safe loss scale; None where no layer had gradients.
    """

    name: str
    class_name: str
    calls: int = 0
    inputs: Magnitudes = field(default_factory=Magnitudes, repr=False)
    outputs: Magnitudes = field(default_factory=Magnitudes, repr=False)
    weights: Magnitudes = field(default_factory=Magnitudes, repr=False)
    output_gradients: Magnitudes = field(default_factory=Magnitudes, repr=False)
    weight_gradients: Magnitudes = field(default_factory=Magnitudes, repr=False)
    differences: dict[str, RelativeDifference] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    not_compared: str = ""
    is_random: bool = False
    has_inner: bool = False
    reasons: dict[str, str] = field(default_factory=dict)
    gradient_lost: float | None = None

    @property
    def gradients(self) -> tuple[Magnitudes, Magnitudes]:
        """The magnitudes of its gradients."""
        return self.output_gradients, self.weight_gradients

    @property
    def runs_in(self) -> list[str]:
        """The names of the dtypes that it may run in."""
        return [name for name in DTYPES if name not in self.reasons]

    @property
    def bits(self) -> dict[str, float]:
        """How often its largest input, output or weight can double, by dtype.

        Negative: it is beyond the range.
        """
        found = (self.inputs, self.outputs, self.weights)
        return {n: min(m.bits(dtype) for m in found) for n, dtype in DTYPES.items()}

    @property
    def errors(self) -> dict[str, float]:
        """Its relative L2 errors by dtype, against float32 with the same inputs."""
        return {name: each.relative for name, each in self.differences.items()}

    @property
    def ratios(self) -> dict[str, float]:
        """The errors in multiples of what rounding explains."""
        # Inputs, weights and outputs are rounded.
        count = bool(self.inputs.numel) + bool(self.weights.numel) + 1
        return {
            name: error / expected_error(DTYPES[name], count)
            for name, error in self.errors.items()
        }


class LayerProbe:
    """Looks at layers in a run: modules without submodules, or with own parameters.

    Hooks keep copies of what each call is given, and look at it when it has ended. The
    calls of a backward, where a checkpoint computes forwards again, are none.

    Args:
        model: The model.

    Attributes:
        layers: What was found, by module, in the order in which they first returned.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers: dict[nn.Module, Layer] = {}
        self._names = dict(layers_of(model))
        self._devices = devices_of(self._names)
        self._running: list[tuple[LayerCall, RandomStates]] = []
        self._handles = Handles()

    @property
    def not_seen(self) -> list[str]:
        """The names of the layers that were not called."""
        return [n for module, n in self._names.items() if module not in self.layers]

    def __enter__(self) -> LayerProbe:
        for module in self._names:
            self._handles += [
                module.register_forward_pre_hook(self._begin, with_kwargs=True),
                module.register_forward_hook(self._end, prepend=True),
            ]
        return self

    def __exit__(self, *exception: object) -> None:
        self._handles.remove_all()

    def add_gradients(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Adds the gradients of parameters, by the parameters' ids."""
        for module, layer in self.layers.items():
            for parameter in own_parameters(module).values():
                if id(parameter) in gradients:
                    layer.weight_gradients.add(gradients[id(parameter)])

    def _begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if graph_task_id() >= 0:
            return
        if self._running:
            self._running[-1][0].has_inner = True
        call = LayerCall(module)
        try:
            call.given = copied_given((args, kwargs), torch.Tensor.clone)
        except NotRebuilt:
            call.given = None
        self._running.append((call, RandomStates(self._devices)))

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if graph_task_id() >= 0:
            return
        call, states = self._running.pop()
        while call.module is not module:  # one within it has raised
            call, states = self._running.pop()
        call.output, call.is_random = output, bool(states.drawn())
        self._add(call)

    def _add(self, call: LayerCall) -> None:
        layer = self._layer_of(call)
        layer.calls += 1
        for given in floats_in(call.given):
            layer.inputs.add(given)
        outputs = floats_in(call.output)
        for made in outputs:
            layer.outputs.add(made)
            if made.requires_grad:
                made.register_hook(layer.output_gradients.add)  # type: ignore[no-untyped-call]
        if layer.not_compared or not outputs:
            return
        layer.has_inner, layer.is_random = call.has_inner, call.is_random
        layer.not_compared = why_not_compared(call)
        if not layer.not_compared:
            for name in DTYPES.keys() - layer.failures.keys():
                _add_error(layer, name, call, outputs)

    def _layer_of(self, call: LayerCall) -> Layer:
        if call.module not in self.layers:
            name = self._names[call.module]
            layer = Layer(name, class_name_of(type(call.module)))
            self.layers[call.module] = layer
            for each in own_parameters(call.module).values():
                if each is not None and floats_in(each):
                    layer.weights.add(each)
        return self.layers[call.module]


def why_not_compared(call: LayerCall) -> str:
    """Returns why a call cannot be computed again in half precision, or ''."""
    if call.has_inner:
        return "it calls other modules"
    if call.is_random:
        return "it draws random numbers"
    if call.given is None:
        return "its arguments cannot be copied"
    if isinstance(vars(call.module).get("forward"), Float32Forward):
        return "keep_in_fp32 holds it in float32 already"
    floats = floats_in((call.given, call.output))
    for each in floats:
        if not each.is_floating_point() or each.layout is not torch.strided:
            return f"it works on {dtype_name(each.dtype)} tensors ({each.layout})"
    if any(each.dtype != torch.float32 for each in floats):
        return "it does not work in float32 in the float32 run"
    if any(each.is_complex() for each in call.module.parameters()):
        return "it has complex weights"
    return ""


def _add_error(
    layer: Layer, name: str, call: LayerCall, reference: list[torch.Tensor]
) -> None:
    try:
        made = call.computed(DTYPES[name])
    except Exception as raised:  # a dtype that this device has no kernel for
        layer.failures[name] = error_line(raised)
        layer.differences.pop(name, None)
        return
    error = layer.differences.setdefault(name, RelativeDifference())
    for value, golden in zip(made, reference, strict=True):
        error.add(value, golden)


def layers_of(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yields the modules that compute, with their names.

    Args:
        model: The model.
    """
    for name, module in named_modules(model):
        is_last = not any(True for _ in module.children())
        if not is_last and not any(True for _ in module.parameters(recurse=False)):
            continue
        if has_forward(module) and type(module) is not nn.Identity:
            yield module, name
