"""Measures each layer in a float32 run, and computes it again in narrower dtypes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...base.modules import Handles, class_name_of, named_modules
from ...base.tensors import devices_of, real_parts
from ...base.text import bits_left, dtype_name, error_line
from ...base.tree import CALL_DEPTH, mapped, tensors_in
from ...explainer.remedies.keep_in_fp32 import Float32Forward
from ...guard.undo.random import RandomStates
from ...scanner.ops import scan
from ...torch_internals.module_internals import own_parameters
from ...torch_internals.running import (
    graph_task_id,
)
from .copies import Convert, on_copies, to_dtype

# Magnitudes of tensors, by powers of two, against the ranges of dtypes.


_EXPONENT_BITS = 8  # of float32
_BIAS = 127  # of float32's exponents
_NUM_BINS = 2**_EXPONENT_BITS
_HALF_OF_LEAST = -25  # float16's least number is 2**-24; below half of it lies 0
_LEAST_NORMAL = -14  # 2**-14 is float16's smallest normal number


class Magnitudes:
    """The magnitudes of all tensors that were added.

    Attributes:
        abs_max: The largest finite magnitude; 0.0 if there was none.
        numel: How many values there were.
        zeros: How many of them were 0.
        has_nan: Whether one was nan.
    """

    def __init__(self) -> None:
        self.abs_max = 0.0
        self.numel = 0
        self.zeros = 0
        self.has_nan = False
        self._bins = torch.zeros(_NUM_BINS, dtype=torch.int64)

    def add(self, tensor: torch.Tensor) -> None:
        """Counts the values of a float or complex tensor. Incurs CPU-GPU syncs."""
        values = _plain(tensor)
        if not values.numel():
            return
        stat = scan([values])[0]
        largest = stat.abs_max
        if stat.has_inf or stat.has_nan or largest is None:
            finite = values[values.isfinite()].abs()
            largest = float(finite.max()) if finite.numel() else 0.0
        self.has_nan |= stat.has_nan
        self.abs_max = max(self.abs_max, float(largest))
        real = real_parts(values)
        bits = real.float().reshape(-1).contiguous().view(torch.int32)
        exponents = (bits >> (32 - 1 - _EXPONENT_BITS)) & (_NUM_BINS - 1)
        self._bins += torch.bincount(exponents, minlength=_NUM_BINS).cpu()
        self.numel += real.numel()
        self.zeros += int((real == 0).sum())

    def bits(self, dtype: torch.dtype) -> float:
        """The headroom: how often the largest magnitude can double within a dtype."""
        return bits_left(torch.finfo(dtype).max, self.abs_max)

    def lost(self, scale: float = 1.0) -> float:
        """The share of the values that float16 makes 0, of those that are not 0.

        That is what lies below 2**-25.

        Args:
            scale: The power of two by which the values are multiplied first.
        """
        return self._share_below(_HALF_OF_LEAST - round(math.log2(scale)))

    def subnormal(self, scale: float = 1.0) -> float:
        """The share that is subnormal in float16 or lost, of the values that are not 0.

        Args:
            scale: The power of two by which the values are multiplied first.
        """
        return self._share_below(_LEAST_NORMAL - round(math.log2(scale)))

    def _share_below(self, exponent: int) -> float:
        """The share of the values below a power of two, of those that are not 0."""
        nonzero = self.numel - self.zeros
        if not nonzero:
            return 0.0
        below = max(0, min(exponent + _BIAS, _NUM_BINS - 1))
        zeros = self.zeros if below else 0
        return (int(self._bins[:below].sum()) - zeros) / nonzero


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()
    return tensor


# One call of a layer computed again in narrower dtypes, against float32.


FLOAT8 = torch.float8_e4m3fn
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float8": FLOAT8}
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


@dataclass
class RelativeDifference:
    """A relative L2 difference, summed up over calls in float64.

    Attributes:
        squares: The sum of the squares of the differences.
        reference: The sum of the squares of the float32 values.
    """

    squares: float = 0.0
    reference: float = 0.0

    @property
    def relative(self) -> float:
        """The relative L2 difference; inf where something became inf or nan."""
        if not self.squares:
            return 0.0
        return math.sqrt(self.squares / self.reference) if self.reference else math.inf

    def add(self, value: torch.Tensor, reference: torch.Tensor) -> None:
        """Adds a tensor, where the float32 one is finite. Incurs CPU-GPU syncs."""
        wide, golden = _as_float64(value), _as_float64(reference)
        is_finite = golden.isfinite()
        golden = golden.where(is_finite, 0)
        squares = float((wide.where(is_finite, 0) - golden).abs().square().sum())
        self.squares += squares if math.isfinite(squares) else math.inf
        self.reference += float(golden.abs().square().sum())


def _as_float64(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.device.type == "mps":  # has no float64
        tensor = tensor.cpu()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


class LayerCall:
    """One call of a module, with copies of what it was given.

    Args:
        module: The module.
        args: Its arguments, as they were before the call.
        kwargs: Its keyword arguments.

    Attributes:
        given: The copies: the arguments and the keyword arguments.
    """

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.module = module
        self.given = _mapped((args, kwargs), lambda tensor: tensor.clone())

    def computed(self, inputs: Convert, weights: Convert) -> list[torch.Tensor]:
        """The floats that the module returns for other inputs and weights.

        Everything is as before afterwards. Raises what the module raises.

        Args:
            inputs: Makes another tensor of each input.
            weights: Makes another tensor of each parameter and buffer.
        """
        args, kwargs = _mapped(self.given, inputs)
        with on_copies(self.module, weights), torch.no_grad():
            return floats_in(self.module.forward(*args, **kwargs))

    def in_dtype(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Runs the module in a dtype, inputs and weights cast to it."""
        if dtype is FLOAT8:
            return self.computed(rounded_to_float8, _rounded_matrix)
        cast = functools.partial(to_dtype, dtype=dtype)
        return self.computed(cast, cast)

    def is_product(self) -> bool:
        """Finds by experiment whether the result is linear in inputs and matrices.

        Powers of two come out of a product bit for bit. Biases are 0 meanwhile.
        """
        if not any(each.dim() > 1 for each in self.module.parameters()):
            return False
        if not any(each.is_floating_point() for each in floats_in(self.given)):
            return False
        once = self.computed(_scaled(1), _scaled_matrix(1))
        doubled = [2 * each for each in once]
        for inputs, matrices in ((2, 1), (1, 2)):
            found = self.computed(_scaled(inputs), _scaled_matrix(matrices))
            if not all(map(torch.equal, found, doubled)):
                return False
        return any(bool(each.any()) for each in once)


def why_not_compared(module: nn.Module, given: Any, output: Any) -> str:
    """Returns why a call cannot be computed again in half precision, or ''.

    Args:
        module: The module.
        given: Its arguments.
        output: What it returned in the float32 run.
    """
    if isinstance(vars(module).get("forward"), Float32Forward):
        return "keep_in_fp32 holds it in float32 already"
    floats = [*floats_in(given), *floats_in(output)]
    for each in floats:
        if not each.is_floating_point() or each.layout is not torch.strided:
            return f"it works on {dtype_name(each.dtype)} tensors ({each.layout})"
    if any(each.dtype != torch.float32 for each in floats):
        return "it does not work in float32 in the float32 run"
    if any(each.is_complex() for each in module.parameters()):
        return "it has complex weights"
    return ""


def floats_in(value: Any) -> list[torch.Tensor]:
    """The float and complex tensors of a value."""
    return [
        each
        for each in tensors_in(value, CALL_DEPTH)
        if each.is_floating_point() or each.is_complex()
    ]


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value with each tensor changed, without graphs, in containers of its own."""
    return mapped(value, lambda each: change(each.detach()), CALL_DEPTH, anew=True)


def rounded_to_float8(tensor: torch.Tensor) -> torch.Tensor:
    """Rounds float32 to e4m3, its largest magnitude scaled to e4m3's; float32 again."""
    if tensor.dtype != torch.float32 or not tensor.numel():
        return tensor.clone()
    step = tensor.abs().max() / torch.finfo(FLOAT8).max
    step = step.clamp_min(torch.finfo(torch.float32).tiny)
    return (tensor / step).to(FLOAT8).float() * step


def _rounded_matrix(tensor: torch.Tensor) -> torch.Tensor:
    return rounded_to_float8(tensor) if tensor.dim() > 1 else tensor.clone()


def _scaled(factor: int) -> Convert:
    return lambda t: t * factor if t.is_floating_point() else t.clone()


def _scaled_matrix(factor: int) -> Convert:
    return lambda t: t * factor if t.dim() > 1 else torch.zeros_like(t)


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
    errors: dict[str, RelativeDifference] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    not_compared: str = ""
    is_product: bool | None = None
    is_random: bool = False
    has_inner: bool = False

    @property
    def num_roundings(self) -> int:
        """The number of inputs, weights and outputs that are rounded."""
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
        self._handles = Handles()

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
            name = class_name_of(type(module))
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
            layer.not_compared = error_line(error)
            return
        for name, dtype in DTYPES.items():
            if name not in layer.failures and (dtype is not FLOAT8 or layer.is_product):
                _add_error(layer, name, call, reference)


def _add_error(
    layer: Layer, name: str, call: LayerCall, reference: list[torch.Tensor]
) -> None:
    error = layer.errors.setdefault(name, RelativeDifference())
    try:
        made = call.in_dtype(DTYPES[name])
    except Exception as raised:  # a dtype that this device has no kernel for
        layer.failures[name] = error_line(raised)
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
