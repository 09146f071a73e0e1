"""Each layer computed again in float32, from the inputs that it had."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..core.devices import devices_of
from ..core.names import named_modules
from ..precision.copies import check_model, to_float32
from ..precision.recast import floats_in
from ..state.random import RandomStates
from ..torch_internals.running import graph_task_id
from ..tree import CALL_DEPTH, NotRebuilt, mapped
from .judged_rows import INHERITED, MADE_HERE, Difference, coarser, error_of_layer
from .measures import measured

_FLAGGED = 8.0


def float32_copy(model: nn.Module) -> nn.Module:
    """A copy of a model with half-precision weights and buffers in float32.

    Raises:
        ValueError: If the model is wrapped, sharded, quantized or not initialized.
    """
    check_model(model)
    with torch.no_grad():
        made = copy.deepcopy(model)
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.data = to_float32(tensor.data)
            tensor.grad = None
    return made


class LocalShadow:
    """Hooks that measure the error that each leaf makes of its own.

    Args:
        model: The model.
        shadow: Its float32 copy.

    Attributes:
        errors: The relative L2 difference to float32, by module name and call.
    """

    def __init__(self, model: nn.Module, shadow: nn.Module) -> None:
        twins = dict(named_modules(shadow))
        self._twins = {
            module: (name, twins[name])
            for name, module in named_modules(model)
            if not any(True for _ in module.children())
        }
        self._devices = devices_of([model])
        self._given: dict[nn.Module, tuple[Any, Any]] = {}
        self._calls: dict[str, int] = {}
        self._handles: list[RemovableHandle] = []
        self.errors: dict[tuple[str, int], float] = {}

    def __enter__(self) -> LocalShadow:
        for module in self._twins:
            self._handles += [
                module.register_forward_pre_hook(self._begin, with_kwargs=True),
                module.register_forward_hook(self._end, prepend=True),
            ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if graph_task_id() < 0:
            with torch.no_grad():
                try:
                    given = mapped((args, kwargs), _widened, CALL_DEPTH, anew=True)
                except NotRebuilt:
                    return  # it is not computed again
                self._given[module] = given
            self._states = RandomStates(self._devices)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if graph_task_id() >= 0 or module not in self._given:
            return
        name, twin = self._twins[module]
        call = self._calls[name] = self._calls.get(name, -1) + 1
        args, kwargs = self._given.pop(module)
        if self._states.drawn():
            return  # what it draws is not drawn again
        with torch.no_grad():
            try:
                found = floats_in(twin.forward(*args, **kwargs))
            except Exception:
                return  # not all code runs in float32
            finally:
                self._states.restore()
            pairs = list(zip(floats_in(output), found, strict=False))
            errors = [
                measured(mine, its, coarser(*(str(t.dtype)[6:] for t in (mine, its))))
                for mine, its in pairs
                if mine.shape == its.shape and mine.dtype != its.dtype
            ]
        if errors:
            self.errors[name, call] = max(each.relative for each in errors)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, in float32 where it is half precision."""
    return to_float32(tensor.detach())


def apply_errors(
    rows: list[Difference], errors: Mapping[tuple[str, int], float]
) -> None:
    """Lets the errors that layers make themselves decide about their outputs."""
    for row in rows:
        place = row.place
        made = errors.get((place.module, place.call))
        if place.role != "output" or made is None:
            continue
        row.made = made
        if made >= _FLAGGED * error_of_layer(row):
            row.verdict = MADE_HERE
        elif row.verdict == MADE_HERE:
            row.verdict = INHERITED
