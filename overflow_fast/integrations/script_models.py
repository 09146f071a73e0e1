"""Finds models and optimizers among all objects of a program."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .. import _C
from ..base.modules import (
    children_of,
    modules_in,
    own_parameters_of,
    parameters_of,
    stepped_by,
)
from ..detector.debug import DebugUnderflowOverflow
from ..detector.hooks import root_hooks
from ..guard.guard import OverflowGuard
from ..guard.optimizers.held_optimizers import optimizers_in
from ..guard.program_guard import ProgramGuard
from ..torch_internals.registry import callers


def stepped_ids(optimizers: Iterable[Optimizer]) -> set[int]:
    """The identities of the parameters that optimizers step."""
    return {id(each) for optimizer in optimizers for each in stepped_by(optimizer)}


def holds_one_of(module: nn.Module, parameters: set[int]) -> bool:
    """Returns True if a module or one inside of it has one of these parameters."""
    return any(id(each) in parameters for each in parameters_of(module))


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
    wanted = stepped_ids(optimizers)
    parents = _parents(modules)
    holders = [each for each in modules if wanted & _own_parameters(each)]
    roots = {id(each): each for each in _roots(holders, parents)}
    found, covered = list[nn.Module](), set[int]()
    counts = {i: parameters_in(root) & wanted for i, root in roots.items()}
    for i in sorted(roots, key=lambda i: -len(counts[i])):
        if not counts[i] <= covered:
            found.append(roots[i])
            covered |= counts[i]
    return found, each_once(_outermost(optimizers, wrappers))


def each_once(values: Iterable[Any]) -> list[Any]:
    """Values without those that are there already, by identity."""
    return list({id(each): each for each in values}.values())


def find_outermost(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> tuple[list[nn.Module], list[Any]]:
    """Finds the outermost modules that hold models, and optimizers' outermost wrappers.

    Returns:
        The modules, and for each optimizer its wrapper, or itself where it has none.
    """
    modules, existing = _existing()
    roots = _roots(models, _parents(modules))
    return roots, _outermost(optimizers, existing)


def without_inner(optimizers: Sequence[Any]) -> list[Any]:
    """The optimizers without those that others of them hold."""
    inner = {id(i) for each in optimizers for i in inside(each) if i is not each}
    return [each for each in optimizers if id(each) not in inner]


def inside(optimizer: Any) -> list[Any]:
    """An optimizer and all that it holds."""
    return [each for _, each in optimizers_in(optimizer)]


def is_made_by_another(optimizer: Optimizer) -> bool:
    """Returns True where the constructor of another optimizer makes it."""
    makers = (each for each in callers() if issubclass(type(each), Optimizer))
    return any(each is not optimizer for each in makers)


def modules_of(guards: Iterable[OverflowGuard]) -> set[nn.Module]:
    """The modules of the models that guards watch."""
    models = (model for guard in guards for model in guard.models)
    return {each for model in models for each in modules_in(model)}


def guards_of(
    guards: Iterable[ProgramGuard], modules: set[nn.Module]
) -> list[ProgramGuard]:
    """Those of some guards that are on and watch one of these modules."""
    return [
        each
        for each in guards
        if each.enabled and not modules.isdisjoint(modules_of([each]))
    ]


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
    return {id(each) for each in parameters_of(module)}


def _existing() -> tuple[list[nn.Module], list[Any]]:
    """All modules, and all optimizers and wrappers of them."""
    modules, optimizers = list[nn.Module](), list[Any]()
    for each in _C.collected(_is_looked_for):
        if issubclass(type(each), nn.Module):
            if "_modules" in vars(each):  # it may be under construction
                modules.append(each)
        elif _has_groups(each):
            optimizers.append(each)
    return modules, optimizers


def _is_looked_for(kind: type) -> bool:
    return issubclass(kind, nn.Module) or callable(
        inspect.getattr_static(kind, "step", None)
    )


def _has_groups(value: Any) -> bool:
    """True for an optimizer, an engine's too, whose properties are not read."""
    if issubclass(type(value), Optimizer):
        return True
    return inspect.getattr_static(value, "param_groups", None) is not None


def _own_parameters(module: nn.Module) -> set[int]:
    return set(map(id, own_parameters_of(module).values()))


def _parents(modules: Sequence[nn.Module]) -> dict[int, list[nn.Module]]:
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in children_of(module).values():
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
    """The outermost wrapper of each optimizer, or itself: Accelerate's, an engine's."""
    held = {id(each): {id(i) for i in inside(each)} - {id(each)} for each in existing}
    all_held = set[int]().union(*held.values())
    outer = [each for each in existing if id(each) not in all_held]
    return [
        next((each for each in outer if id(one) in held[id(each)]), one)
        for one in optimizers
    ]
