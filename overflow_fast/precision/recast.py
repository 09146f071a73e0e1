"""One call of a layer computed again in narrower dtypes, against float32."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..tree import CALL_DEPTH, mapped, tensors_in
from .copies import Convert, on_copies, to_dtype
from .float32 import Float32Forward

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
class Difference:
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
        if not any(is_real(each) for each in floats_in(self.given)):
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
        if not is_real(each) or each.layout is not torch.strided:
            return f"it works on {str(each.dtype)[6:]} tensors ({each.layout})"
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


def first_line(error: Exception) -> str:
    """The class and the first line of an error."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def is_real(tensor: torch.Tensor) -> bool:
    """Tells whether the values are real floats."""
    return tensor.is_floating_point()


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
