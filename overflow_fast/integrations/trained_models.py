"""Finds the models whose parameters optimizers step, among all that exist."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..core.nested_optimizers import optimizers_in
from ..debug import DebugUnderflowOverflow
from ..guard.optimizer_hook import OptimizerHook
from ..recording.hooks import root_hooks
from ..torch_internals.registry import stack


def parameters_of(optimizers: Iterable[Optimizer]) -> set[int]:
    """The identities of the parameters that optimizers step."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return {id(parameter) for group in groups for parameter in group["params"]}


def holds_one_of(module: nn.Module, parameters: set[int]) -> bool:
    """Returns True if a module or one inside of it has one of these parameters."""
    return any(id(each) in parameters for each in module.parameters())


def find_trained(
    optimizers: Sequence[Optimizer],
) -> tuple[list[nn.Module], list[Any]]:
    """Finds the outermost modules that hold the optimizers' parameters.

    Walks all objects that the garbage collector knows, and calls none of them.

    Args:
        optimizers: The optimizers.

    Returns:
        The modules, no two with the same parameters; and the optimizers, each replaced
        by its outermost wrapper, such as Accelerate's.
    """
    modules, wrappers = _existing()
    wanted = parameters_of(optimizers)
    parents = _parents(modules)
    holders = [each for each in modules if wanted & _own_parameters(each)]
    roots = {id(each): each for each in _roots(holders, parents)}
    found, covered = list[nn.Module](), set[int]()
    counts = {i: parameters_in(root) & wanted for i, root in roots.items()}
    for i in sorted(roots, key=lambda i: -len(counts[i])):
        if not counts[i] <= covered:
            found.append(roots[i])
            covered |= counts[i]
    outermost = {id(each): each for each in _outermost(optimizers, wrappers)}
    return found, list(outermost.values())


def find_wrappers(optimizers: Sequence[Optimizer]) -> list[Any]:
    """Finds the outermost wrapper of each optimizer: itself where there is none."""
    return _outermost(optimizers, _existing()[1])


def without_inner(optimizers: Sequence[Any]) -> list[Any]:
    """The optimizers without those that others of them hold."""
    inner = {id(i) for each in optimizers for i in inside(each) if i is not each}
    return [each for each in optimizers if id(each) not in inner]


def inside(optimizer: Any) -> list[Any]:
    """An optimizer and all that it holds."""
    return [each for _, each in optimizers_in(optimizer)]


def is_made_by_another(optimizer: Optimizer) -> bool:
    """Returns True where the constructor of another optimizer makes it."""
    callers = (frame.f_locals.get("self") for frame in stack())
    return any(
        issubclass(type(caller), Optimizer) and caller is not optimizer
        for caller in callers
    )


def have_detectors(models: Sequence[nn.Module]) -> bool:
    """Returns True if the program has put a detector on one of its models."""
    owners = (hook.owner for model in models for hook in root_hooks(model))
    return any(isinstance(owner, DebugUnderflowOverflow) for owner in owners)


def named_by_class(models: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Names models by their classes, with a number where two have the same."""
    names = [type(model).__name__ for model in models]
    return {
        name if names.count(name) == 1 else f"{name}{names[:i].count(name)}": model
        for i, (name, model) in enumerate(zip(names, models, strict=True))
    }


def parameters_in(module: nn.Module) -> set[int]:
    """The identities of a module's parameters."""
    return {id(each) for each in module.parameters()}


def _existing() -> tuple[list[nn.Module], list[Any]]:
    """All modules, and all optimizers and wrappers of them."""
    modules, optimizers = list[nn.Module](), list[Any]()
    for each in gc.get_objects():
        kind = type(each)
        if issubclass(kind, nn.Module):
            if "_modules" in vars(each):  # it may be under construction
                modules.append(each)
        elif issubclass(kind, Optimizer):
            optimizers.append(each)
    return modules, optimizers


def _own_parameters(module: nn.Module) -> set[int]:
    return {id(each) for each in module.parameters(recurse=False)}


def _parents(modules: Sequence[nn.Module]) -> dict[int, list[nn.Module]]:
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in module.children():
            parents.setdefault(id(child), []).append(module)
    return parents


def _roots(
    holders: Sequence[nn.Module], parents: dict[int, list[nn.Module]]
) -> list[nn.Module]:
    """The modules above some that no other module contains."""
    seen, waiting, roots = {id(each) for each in holders}, list(holders), []
    while waiting:
        module = waiting.pop()
        above = parents.get(id(module), [])
        if not above:
            roots.append(module)
        for each in above:
            if id(each) not in seen:
                seen.add(id(each))
                waiting.append(each)
    return roots


def _outermost(optimizers: Sequence[Optimizer], existing: Sequence[Any]) -> list[Any]:
    """The outermost wrapper of each optimizer, or itself."""
    wrapper_of = {
        id(inner): each
        for each in existing
        for name in ("optimizer", "optim")
        if (inner := vars(each).get(name)) is not None and inner is not each
    }
    found = list[Any](optimizers)
    for _ in existing:
        if not any(id(each) in wrapper_of for each in found):
            break
        found = [wrapper_of.get(id(each), each) for each in found]
    return found


def note_wrappers(hooks: Iterable[OptimizerHook]) -> None:
    """Tells optimizers' hooks of the wrappers that were made since."""
    of = [(hook, hook.optimizer) for hook in hooks]
    living = [(hook, optimizer) for hook, optimizer in of if optimizer is not None]
    wrappers = find_wrappers([optimizer for _, optimizer in living])
    for (hook, _), wrapper in zip(living, wrappers, strict=True):
        hook.note_wrapper(wrapper)
