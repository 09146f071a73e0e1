"""A layer computed again, alone, in another dtype: with what it was given, on copies.

Hooks keep copies of what each call of some modules is given (`LayerCalls`). When it has
ended, the call is handed over as a `LayerCall`, which can be computed again in any
dtype as often as one likes: weights, buffers, attributes and random states are
afterwards what they were, bit for bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...base.modules import Handles
from ...base.tensors import devices_of
from ...base.tree import CALL_DEPTH, NotRebuilt, mapped
from ...explainer.tensor_kinds import floats_in
from ...guard.undo.random import RandomStates
from ...torch_internals.running import graph_task_id
from .copies import on_copies, to_dtype


@dataclass
class LayerCall:
    """One call of a module. One that has called others is not computed again.

    Attributes:
        name: The module's name.
        module: The module.
        given: Copies of its arguments and keyword arguments, as they were before the
            call; None where no copy can be made of them.
        output: What it returned.
        has_inner: Whether it called other modules that have hooks.
        is_random: Whether it drew random numbers.
    """

    name: str
    module: nn.Module
    given: Any = None
    output: Any = None
    has_inner: bool = False
    is_random: bool = False

    def computed(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """The floats that the module returns with inputs and weights in a dtype.

        Everything is as before afterwards. Raises what the module raises.
        """
        cast = functools.partial(to_dtype, dtype=dtype)
        args, kwargs = _mapped(self.given, cast)
        with on_copies(self.module, dtype), torch.no_grad():
            return floats_in(self.module.forward(*args, **kwargs))


class LayerCalls:
    """Hooks that hand over each call of some modules when it has ended.

    Not those of a backward, where a checkpoint computes forwards again.

    Args:
        names: The modules, with their names.
        on_call: Called with each.
    """

    def __init__(
        self, names: Mapping[nn.Module, str], on_call: Callable[[LayerCall], None]
    ) -> None:
        self._names = names
        self._on_call = on_call
        self._devices = devices_of(names)
        self._running: list[tuple[LayerCall, RandomStates]] = []
        self._handles = Handles()

    def __enter__(self) -> LayerCalls:
        for module in self._names:
            self._handles += [
                module.register_forward_pre_hook(self._begin, with_kwargs=True),
                module.register_forward_hook(self._end, prepend=True),
            ]
        return self

    def __exit__(self, *exception: object) -> None:
        self._handles.remove_all()

    def _begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if graph_task_id() >= 0:
            return
        if self._running:
            self._running[-1][0].has_inner = True
        call = LayerCall(self._names[module], module)
        try:
            call.given = _mapped((args, kwargs), torch.Tensor.clone)
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
        self._on_call(call)


@dataclass
class RelativeDifference:
    """A relative L2 difference, summed up over tensors in float64.

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


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value with each tensor changed, without graphs, in containers of its own."""
    return mapped(value, lambda each: change(each.detach()), CALL_DEPTH, anew=True)


def _as_float64(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.device.type == "mps":  # has no float64
        tensor = tensor.cpu()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
