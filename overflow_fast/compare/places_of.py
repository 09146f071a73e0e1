"""Where tensors are in a step, and which of them a model has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..core.names import named_modules, unwrapped_class
from ..torch_internals.compiler import uncompiled
from ..torch_internals.module_internals import own_buffers, own_parameters

STATE, FORWARD, BACKWARD = "state", "forward", "backward"


@dataclass(frozen=True)
class Place:
    """The place of a tensor in a step.

    Attributes:
        phase: "state" (what the step begins with), "forward" or "backward".
        module: The name of its module; "" is the model.
        class_name: The module's class.
        call: Which call of the module in this step, from 0.
        role: "parameter", "buffer", "input", "output", "output_gradient",
            "input_gradient" or "parameter_gradient".
        path: Its name in the module, or its place in the arguments or the output.
        caller: The module that called this one.
        is_leaf: Whether the module has no submodules.
    """

    phase: str
    module: str
    class_name: str
    call: int
    role: str
    path: str
    caller: str = ""
    is_leaf: bool = True

    @property
    def key(self) -> tuple[str, int, str, str]:
        """The same in each run of the same model."""
        return self.module, self.call, self.role, self.path

    @property
    def is_computed(self) -> bool:
        """True for what the model makes: no weight of its own, nor what it is given."""
        is_given = self.role == "input" and not self.module
        return self.phase != STATE and not is_given

    def __str__(self) -> str:
        """The place as users read it, such as `h.0.attn: output[0]`."""
        name, call = self.module or "the model", f" #{self.call}" if self.call else ""
        role = self.role.replace("_", " ")
        if self.role.startswith(("parameter", "buffer")):
            own = ".".join(filter(None, (self.module, self.path)))
            return f"{own}: {role}"
        return f"{name}{call}: {role}{self.path}"


def to_hook(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yields one module for each name, and compiled wrappers."""
    innermost = {name: module for name, module in named_modules(model)}
    for name, module in named_modules(model):
        is_compiled = uncompiled(module) is not module
        if isinstance(module, torch.jit.ScriptModule):
            continue  # has no forward hooks
        if is_compiled or innermost[name] is module:
            yield module, name


def class_of(module: nn.Module) -> str:
    return unwrapped_class(type(uncompiled(module))).__name__


def state_of(model: nn.Module) -> Iterator[tuple[Place, torch.Tensor]]:
    """Yields parameters and buffers, shared ones once."""
    seen = set[int]()
    for name, module in named_modules(model):
        kind = class_of(module)
        for role, table in (
            ("parameter", own_parameters(module)),
            ("buffer", own_buffers(module)),
        ):
            for path, tensor in table.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield Place(STATE, name, kind, 0, role, path), tensor
