"""Names and kinds of modules, without the parts of what wraps them."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..torch_internals.module_internals import (
    BUFFERS,
    COMPOSED,
    MODULES,
    PARAMETERS,
    WRAPPED,
)
from ..torch_internals.tensor_internals import local_tensor

_DDP = {"DistributedDataParallel"}
_FSDP = {"FSDPModule", "FullyShardedDataParallel"}
ENGINES_MODULE = "module"  # where a wrapper of an engine's has the model
_ENGINES_METHODS = ("__getattr__", "state_dict", "load_state_dict", "step", "backward")


# A wrapper may have any attribute in the place of `nn.Module`'s methods: a list called
# `buffers`, a layer called `modules`. So nothing here calls them by their names.


def walk(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Lists what `nn.Module.named_modules()` does, of any module."""
    found = list[tuple[str, nn.Module]]()
    seen, waiting = set[int](), [("", model)]
    while waiting:
        fqn, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.append((fqn, module))
        held = getattr(module, MODULES)
        if held:  # most modules of a model have none
            prefix, pairs = f"{fqn}." if fqn else "", reversed(held.items())
            waiting += [(f"{prefix}{k}", each) for k, each in pairs if each is not None]
    return found


def modules_in(model: nn.Module) -> list[nn.Module]:
    """Lists a model and all modules in it, each once."""
    return [module for _, module in walk(model)]


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """The modules that a module itself holds, by name."""
    held = getattr(module, MODULES)
    # Most modules of a model have none.
    return {k: each for k, each in held.items() if each is not None} if held else {}


def own_parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a module itself holds, by name."""
    held = own_tensors(module, PARAMETERS).items()
    return {key: each for key, each in held if each is not None}


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """Lists all parameters of a model, each once."""
    return _each_once(model, PARAMETERS)


def first_parameter_of(model: nn.Module) -> nn.Parameter | None:
    """The first of `parameters_of()`, or None; what follows it is not looked at."""
    seen, waiting = set[int](), [model]
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        for each in own_tensors(module, PARAMETERS).values():
            if each is not None:
                found: nn.Parameter = each
                return found
        waiting += reversed(children_of(module).values())
    return None


def buffers_of(model: nn.Module) -> list[torch.Tensor]:
    """Lists all buffers of a model, each once."""
    return _each_once(model, BUFFERS)


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Lists all parameters of a model, then its buffers."""
    return [*parameters_of(model), *buffers_of(model)]


def own_tensors(module: Any, kind: str) -> dict[str, Any]:
    """A module's own parameters or buffers; TorchScript keeps its elsewhere.

    Args:
        module: The module.
        kind: The attribute that holds the table: `PARAMETERS` or `BUFFERS`.
    """
    if is_scripted(module):
        is_buffers = kind == BUFFERS
        named = module.named_buffers if is_buffers else module.named_parameters
        return dict(named(recurse=False))
    own: dict[str, Any] = module.__dict__[kind]
    return own


def is_scripted(module: object) -> bool:
    """True for a module of TorchScript's."""
    return isinstance(module, torch.jit.ScriptModule)


def _each_once(model: nn.Module, kind: str) -> list[Any]:
    tables = [own_tensors(module, kind) for module in modules_in(model)]
    found = {id(each): each for table in tables for each in table.values()}
    return [each for each in found.values() if each is not None]


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Lists the pairs of `model.named_modules()`, with the names before wrapping.

    A wrapper and what it wraps have the same name; the wrapper comes first. So it is
    with the wrappers of training engines around the whole model.
    """
    named: list[tuple[str, nn.Module]] = []
    names: dict[str, str] = {}
    wrapped: set[str] = set()  # by their names after wrapping
    for fqn, module in walk(model):
        parent, _, key = fqn.rpartition(".")
        name = names.get(parent, "")
        if fqn and fqn not in wrapped:
            name = f"{name}.{key}" if name else key
        names[fqn] = name
        inner = _wrapped_by(module)
        if inner is None and not name and is_engine(module):
            inner = ENGINES_MODULE
        if inner is not None:
            wrapped.add(f"{fqn}.{inner}" if fqn else inner)
        named.append((name, module))
    return named


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Lists the parameters of a model, each once, with their names before wrapping."""
    return _named_once(model, PARAMETERS)


def named_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Lists the buffers of a model, each once, with their names before wrapping."""
    return _named_once(model, BUFFERS)


def tensor_name(fqn: str, key: str) -> str:
    """The name of a tensor in the module of a name, which is empty for the root."""
    return f"{fqn}.{key}" if fqn else key


def module_of_parameter(name: str) -> str:
    """The name of the module that has a parameter."""
    return name.rpartition(".")[0]


def _named_once(model: nn.Module, kind: str) -> list[tuple[str, Any]]:
    named: list[tuple[str, Any]] = []
    seen: set[int] = set()
    for fqn, module in named_modules(model):
        for key, tensor in own_tensors(module, kind).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                named.append((tensor_name(fqn, key), tensor))
    return named


def has_base(cls: type, names: Container[str]) -> bool:
    """True if a class, or one of its bases, has one of these names."""
    return any(base.__name__ in names for base in cls.__mro__)


def is_ddp(module: nn.Module) -> bool:
    """True for torch's DistributedDataParallel; others have classes of this name."""
    named = has_base(type(module), _DDP)
    return named and hasattr(module, "require_backward_grad_sync")


def is_sharded(model: nn.Module) -> bool:
    """True if a model's own parameters are shards of its modules' weights.

    This is so under FSDP, and where parameters are DTensors. A module's call then sees
    gathered parameters, or parts with a layout of their own; the parts are what
    `model.parameters()` yields outside of calls.
    """
    if any(has_base(each, _FSDP) for each in {type(m) for m in modules_in(model)}):
        return True
    return any(local_tensor(each) is not None for each in parameters_of(model))


def unwrapped_class(cls: type) -> type:
    """A module's class without the one that FSDP2 or `replicate()` puts over it."""
    own, *bases = cls.__mro__
    prefix = COMPOSED.get(bases[0].__name__) if bases else None
    for base in bases[1:]:
        if prefix is not None and own.__name__ == prefix + base.__name__:
            return base
    return own


def class_name_of(cls: type) -> str:
    """The name of a module's class, as frames and reports have it."""
    return unwrapped_class(cls).__name__


def gradient_taker(models: Iterable[nn.Module]) -> str:
    """Names an engine whose hooks take gradients as backward makes them; "" for none.

    A second backward would add to its buffers, or be refused: DeepSpeed's, Megatron's.
    Its class is its name where one of the models is its wrapper.
    """
    for model in models:
        for name, module in named_modules(model):
            packages = {each.__module__.split(".")[0] for each in type(module).__mro__}
            if not name and packages & _ENGINES and is_engine(module):
                return type(module).__name__
        if any(hasattr(p, mark) for p in parameters_of(model) for mark in _TAKEN):
            return "the training engine"
    return ""


_ENGINES = {"deepspeed", "megatron"}
# Attributes of parameters: Megatron's gradient buffers, DeepSpeed's ZeRO.
_TAKEN = ("main_grad", "grad_added_to_main_grad", "_hp_mapping", "ds_id")


def is_engine(module: nn.Module) -> bool:
    """True if a module only stands around another: an engine's wrapper of the model.

    It holds nothing but one module, `module`, and passes on to it what a plain module
    does by itself (its state dict, its attributes), or has an engine's methods. So do
    DeepSpeed's engine, and Megatron's DistributedDataParallel and Float16Module.
    """
    if [*children_of(module)] != [ENGINES_MODULE] or any(
        tensor is not None
        for kind in (PARAMETERS, BUFFERS)
        for tensor in own_tensors(module, kind).values()
    ):
        return False
    if has_base(type(module), {"LightningModule"}):  # a user's model
        return False
    own = [cls for cls in type(module).__mro__ if not issubclass(nn.Module, cls)]
    passes_on = any(name in vars(cls) for cls in own for name in _ENGINES_METHODS)
    return passes_on or any("DataParallel" in cls.__name__ for cls in own)


def _wrapped_by(module: nn.Module) -> str | None:
    for cls in type(module).__mro__:
        if cls.__name__ in WRAPPED and cls.__module__.startswith("torch."):
            return WRAPPED[cls.__name__]
    return None


def stepped_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """Lists the parameters that an optimizer steps, by its groups."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def is_within(name: str, outer: str) -> bool:
    """True if a module is inside of another, by their qualified names."""
    return name != outer and (not outer or name.startswith(f"{outer}."))


class Handles(list[RemovableHandle]):
    """The handles of hooks that are removed together, at the latest on leaving it."""

    def __enter__(self) -> Handles:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove_all()

    def remove_all(self) -> None:
        """Removes the hooks. Calling it again changes nothing."""
        for handle in self:
            handle.remove()
        self.clear()
