"""Names and kinds of modules, without the parts of what wraps them."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..torch_internals.module_internals import (
    BUFFERS,
    COMPOSED,
    MODULES,
    PARAMETERS,
    WRAPPED,
    forward_pre_hooks,
    holds_gradients,
)
from ..torch_internals.tensor_internals import local_tensor
from .text import kind_of

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


# How a step is given by hand: a model, a batch and a function that makes the loss.


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


def check_module(model: object, argument: str = "model") -> None:
    """Raises TypeError if an argument is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{argument} must be a torch.nn.Module, got {kind_of(model)}")


def step_of(
    model: nn.Module, loss: Callable[..., torch.Tensor] | None
) -> Callable[[Any], Any]:
    """Makes one function of a model and its loss, which takes the batch.

    Args:
        model: The model.
        loss: Takes the batch, or the model and the batch; None: the model is called.

    Raises:
        TypeError: If the model is no module, or the loss cannot be called.
    """
    check_module(model)
    if loss is None:
        return lambda batch: call_with(model, batch)
    if not callable(loss):
        raise TypeError(
            "loss must be a callable that takes the batch, or the model and the batch, "
            f"and returns a loss, got {type(loss).__name__}"
        )
    if _num_required(loss) >= 2:
        return lambda batch: loss(model, batch)
    return loss


def call_with(model: nn.Module, batch: Any) -> Any:
    """Calls a model; the items of a batch that is a mapping or list are arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _num_required(function: Callable[..., Any]) -> int:
    """The number of positional arguments that a function needs."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in parameters)


# Kinds of modules, known from their classes: torch's own, and normalizations.


_LINEAR = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_NORMALIZATIONS = (
    *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NORMALIZATION_NAME = re.compile(r"(Layer|RMS|Group)_?Norm(\w*[a-z0-9])?$")


def is_linear(module: nn.Module) -> bool:
    """True if a module only multiplies its input by its weights, and adds."""
    forwards = [each.forward for each in _LINEAR]
    return type(module).forward in forwards and _is_plain(module)


def is_normalization(module: nn.Module) -> bool:
    """True if a module returns small values for any input.

    So do torch's normalizations; batch norms in training alone. Classes of others are
    recognized by their names and their code, if they have no submodules.
    """
    if isinstance(module, _BATCH_NORMS):
        return module.training and is_of_torch(module)
    if isinstance(module, _NORMALIZATIONS):
        return is_of_torch(module) or _normalizes_once(module)
    is_named = _NORMALIZATION_NAME.search(type(module).__name__) is not None
    has_children = bool(children_of(module))
    return is_named and not has_children and _normalizes_once(module)


def is_of_torch(module: nn.Module) -> bool:
    """True if a module's forward is torch's own, unchanged."""
    forward = inspect.getattr_static(type(module), "forward", None)  # a scripted one's
    place = str(getattr(forward, "__module__", ""))  # is a descriptor that raises
    return place.startswith("torch.nn.") and _is_plain(module)


def is_layer_of_torch(module: nn.Module | None) -> bool:
    """True if a module is one of torch.nn's, and has no submodules."""
    if module is None or children_of(module):
        return False
    return type(module).__module__.startswith("torch.nn.")


def _normalizes_once(module: nn.Module) -> bool:
    """True if a forward takes one tensor, and divides by one measure of it.

    A forward that takes a second tensor, or measures a fused normalization's input, may
    scale its output by that.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or "forward" in module.__dict__ or code.co_argcount != 2:
        return False
    from .torch_ops import has  # a scan needs no table of operations

    names = set(code.co_names)
    num_roots = sum(has(name, "root") for name in names)
    if "super" in names or any(has(name, "normalizes") for name in names):
        return not num_roots and not any(has(name, "measure") for name in names)
    return num_roots == 1


def _is_plain(module: nn.Module) -> bool:
    """True if a module computes what its class does, unchanged."""
    return not (
        "forward" in module.__dict__
        or forward_pre_hooks(module)
        or parametrize.is_parametrized(module)
    )


# Models that several ranks share: what wraps them, in a replay.


_DDP = {"DistributedDataParallel"}
_FSDP2 = {"FSDPModule"}


@contextlib.contextmanager
def without_reduction(models: Iterable[nn.Module]) -> Iterator[None]:
    """Makes DDP leave gradients as each rank computes them.

    They tell which rank is to blame, no communication hook is called, and the memory
    that gradients are reduced in, of which the step's own may be views, stays as it is.
    """
    wrappers = _ddp_in(models)
    before = [wrapper.require_backward_grad_sync for wrapper in wrappers]
    for wrapper in wrappers:
        wrapper.require_backward_grad_sync = False
    try:
        yield
    finally:
        for wrapper, was_reducing in zip(wrappers, before, strict=True):
            wrapper.require_backward_grad_sync = was_reducing


def set_shares_buffers(model: nn.Module, value: bool) -> None:
    """Makes DDP take the first rank's buffers in its next forward, or not."""
    for wrapper in _ddp_in([model]):
        wrapper.require_forward_param_sync = value


def reshard(models: Iterable[nn.Module]) -> None:
    """Makes FSDP2 forget gathered parameters, as only a backward does."""
    for module in _all_of(models, _FSDP2):
        module.reshard()


def reduces(models: Mapping[str, nn.Module]) -> bool:
    """True if a replay reduces gradients as the step did: with FSDP2 alone."""
    return _has(models.values(), _FSDP2) and not _ddp_in(models.values())


def why_not(models: Iterable[nn.Module]) -> str:
    """Why a step of several ranks cannot be replayed with its models; else ""."""
    models = list(models)
    if _has(models, {"FullyShardedDataParallel"}):
        return "has a model under FSDP1, whose gradients cannot be set aside"
    if _has(models, {"DDP"}):
        return "has a model under replicate(), whose reduction cannot be left out"
    if any(holds_gradients(module) for module in _all_of(models, _FSDP2)):
        return "has gradients under fully_shard() that are not reduced yet"
    return ""


def _has(models: Iterable[nn.Module], names: set[str]) -> bool:
    return any(True for _ in _all_of(models, names))  # one may have the length 0


def _ddp_in(models: Iterable[nn.Module]) -> list[Any]:
    return [each for model in models for each in modules_in(model) if is_ddp(each)]


def _all_of(models: Iterable[nn.Module], names: set[str]) -> Iterator[Any]:
    """Yields the modules of classes with these names."""
    for model in models:
        for module in modules_in(model):
            if has_base(type(module), names):
                yield module
