"""Measures each layer in a float32 run: magnitudes, gradients, errors in half."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..core.devices import devices_of
from ..core.names import named_modules, unwrapped_class
from ..state.random import RandomStates
from ..torch_internals.module_internals import own_parameters
from ..torch_internals.running import graph_task_id
from .magnitudes import Magnitudes
from .recast import (
    DTYPES,
    FLOAT8,
    Difference,
    LayerCall,
    first_line,
    floats_in,
    why_not_compared,
)


@dataclass
class Layer:
    """A module as the float32 run found it, over all of its calls.

    Attributes:
        name: Its qualified name.
        class_name: Its class.
        calls: How often it was called.
        inputs: Magnitudes of the floats it was given.
        outputs: Magnitudes of the floats it returned.
        weights: Magnitudes of its own parameters.
        output_gradients: Magnitudes of the gradients of what it returned.
        weight_gradients: Magnitudes of the gradients of its own parameters.
        errors: Relative L2 differences to float32 of the layer alone in a dtype, with
            the same inputs.
        failures: What it raised in a dtype.
        not_compared: Why there are no errors, or ''.
        is_product: Whether it is linear in its inputs and its matrices; None if that
            was not tried.
        is_random: Whether it draws random numbers.
        has_inner: Whether it calls other modules, which are layers of their own.
    """

    name: str
    class_name: str
    calls: int = 0
    inputs: Magnitudes = field(default_factory=Magnitudes)
    outputs: Magnitudes = field(default_factory=Magnitudes)
    weights: Magnitudes = field(default_factory=Magnitudes)
    output_gradients: Magnitudes = field(default_factory=Magnitudes)
    weight_gradients: Magnitudes = field(default_factory=Magnitudes)
    errors: dict[str, Difference] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    not_compared: str = ""
    is_product: bool | None = None
    is_random: bool = False
    has_inner: bool = False

    @property
    def num_roundings(self) -> int:
        """How many of inputs, weights and output are rounded."""
        return bool(self.inputs.numel) + bool(self.weights.numel) + 1


@dataclass
class _Running:
    """A call that has begun: copies of what it was given, and the random states."""

    call: LayerCall
    random: RandomStates
    has_inner: bool = False


class LayerProbe:
    """Hooks that look at layers: modules without submodules, or with own parameters.

    Args:
        model: The model.

    Attributes:
        layers: What was found, by module, in the order in which they first returned.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers: dict[nn.Module, Layer] = {}
        self._names = dict(layers_of(model))
        self._devices = devices_of([model])
        self._running: list[_Running] = []
        self._is_computing = False
        self._handles: list[RemovableHandle] = []

    @property
    def not_seen(self) -> list[str]:
        """The names of the layers that were not called."""
        return [n for module, n in self._names.items() if module not in self.layers]

    def __enter__(self) -> LayerProbe:
        for module in self._names:
            self._handles += [
                module.register_forward_pre_hook(self._begin, with_kwargs=True),
                module.register_forward_hook(self._end, prepend=True, with_kwargs=True),
            ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def add_gradients(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Adds the gradients of parameters, by the parameters' ids."""
        for module, layer in self.layers.items():
            for parameter in own_parameters(module).values():
                if id(parameter) in gradients:
                    layer.weight_gradients.add(gradients[id(parameter)])

    def _begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._is_computing or graph_task_id() >= 0:
            return
        if self._running:
            self._running[-1].has_inner = True
        call = LayerCall(module, args, kwargs)
        self._running.append(_Running(call, RandomStates(self._devices)))

    def _end(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        if self._is_computing or graph_task_id() >= 0:
            return
        running = self._running.pop()
        layer = self._layer_of(module)
        layer.calls += 1
        for given in floats_in(running.call.given):
            layer.inputs.add(given)
        for made in floats_in(output):
            layer.outputs.add(made)
            if made.requires_grad:
                made.register_hook(layer.output_gradients.add)  # type: ignore[no-untyped-call]
        self._is_computing = True
        try:
            self._compare(layer, running, output)
        finally:
            self._is_computing = False

    def _layer_of(self, module: nn.Module) -> Layer:
        if module not in self.layers:
            name = unwrapped_class(type(module)).__name__
            layer = self.layers[module] = Layer(self._names[module], name)
            for each in own_parameters(module).values():
                if each is not None and floats_in(each):
                    layer.weights.add(each)
        return self.layers[module]

    def _compare(self, layer: Layer, running: _Running, output: Any) -> None:
        """Computes the call again in each dtype."""
        call, reference = running.call, floats_in(output)
        if layer.not_compared or not reference:
            return
        if running.has_inner:
            layer.not_compared, layer.has_inner = "it calls other modules", True
        elif running.random.drawn():
            layer.not_compared, layer.is_random = "it draws random numbers", True
        else:
            layer.not_compared = why_not_compared(call.module, call.given, output)
        if layer.not_compared:
            return
        try:
            if layer.is_product is None:
                layer.is_product = call.is_product()
        except Exception as error:
            layer.not_compared = first_line(error)
            return
        for name, dtype in DTYPES.items():
            if name not in layer.failures and (dtype is not FLOAT8 or layer.is_product):
                _add_error(layer, name, call, reference)


def _add_error(
    layer: Layer, name: str, call: LayerCall, reference: list[torch.Tensor]
) -> None:
    error = layer.errors.setdefault(name, Difference())
    try:
        made = call.in_dtype(DTYPES[name])
    except Exception as raised:  # a dtype that this device has no kernel for
        layer.failures[name] = first_line(raised)
        del layer.errors[name]
        return
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
        if getattr(type(module), "forward", None) is nn.Module.forward:
            continue
        if type(module) is not nn.Identity:
            yield module, name
