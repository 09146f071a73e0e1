"""The selection of a model's modules and tensors to watch."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

from ..torch_internals.module_internals import BUFFERS, PARAMETERS
from .names import named_modules

Named = tuple[list[str], list[torch.Tensor]]


class Wanted(NamedTuple):
    """The kinds of tensors that a guard scans; see `OverflowGuard`."""

    activations: bool = False
    grad_outputs: bool = False
    gradients: bool = False
    weights: bool = False
    buffers: bool = False
    loss: bool = False
    optimizer_state: bool = False


class Selection:
    """Shell-style patterns of qualified names: `h.*.mlp`, `*norm*`; `*` spans dots.

    Args:
        include: Patterns of the modules to watch; None for all.
        exclude: Patterns of modules to leave out.
        prefix: The beginning of the names in reports and patterns.
    """

    def __init__(
        self,
        include: Sequence[str] | None,
        exclude: Sequence[str],
        prefix: str = "",
    ) -> None:
        self._include = include
        self._exclude = exclude
        self._prefix = prefix
        self._known: dict[str, bool] = {}

    def takes(self, fqn: str) -> bool:
        """Returns whether the module of this name is watched; the root's name is empty.

        Args:
            fqn: Its name in its model, without the prefix.
        """
        known = self._known.get(fqn)
        if known is None:
            name = full_name(self._prefix, fqn)
            known = self._include is None or _matches(name, self._include)
            known = known and not _matches(name, self._exclude)
            self._known[fqn] = known
        return known


def full_name(prefix: str, fqn: str) -> str:
    """Returns a module's name in reports and patterns; the root's may be empty."""
    return f"{prefix}{fqn}" if fqn else prefix.rstrip(".")


class NoModuleError(ValueError):
    """Raised for a pattern that no module's name matches."""


def check_patterns(
    argument: str, patterns: Iterable[str], names: Iterable[str]
) -> None:
    """Raises NoModuleError for a pattern that is the name of no module."""
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise NoModuleError(
                f"{argument} must hold names of modules, or patterns of them, such as "
                f"{example_of(names)!r}; {pattern!r} matches none"
            )


def _matches(fqn: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(fqn, pattern) for pattern in patterns)


def example_of(names: Sequence[str]) -> str:
    """Returns the name of one of the innermost modules."""
    return max(names, key=lambda name: (name.count("."), len(name)), default="")


class NamedTensors:
    """The parameters and buffers of a model's modules, as they are now.

    The modules are looked up once, and again when one is gone or after `refresh()`:
    to walk a model's tree takes longer than all that is done with it.
    """

    def __init__(self, prefix: str, selection: Selection) -> None:
        self._prefix = prefix
        self._selection = selection
        self._names: dict[tuple[str, str], str] = {}
        self._modules: list[tuple[str, bool, weakref.ref[nn.Module]]] = []

    def refresh(self) -> None:
        """Looks the modules up again when they are next needed."""
        self._modules = []

    def parameters(self, model: nn.Module, all_modules: bool = False) -> Named:
        """Lists each parameter of the selected, or all, modules by its first name."""
        return self._list(model, PARAMETERS, all_modules)

    def buffers(self, model: nn.Module, all_modules: bool = False) -> Named:
        """Lists each buffer of the selected, or all, modules by its first name."""
        return self._list(model, BUFFERS, all_modules)

    def _list(self, model: nn.Module, kind: str, all_modules: bool) -> Named:
        named: dict[int, tuple[str, torch.Tensor]] = {}
        for fqn, is_selected, module in self._walk(model):
            if is_selected or all_modules:
                for key, tensor in _own(module, kind):
                    if tensor is not None and id(tensor) not in named:
                        named[id(tensor)] = self._name(fqn, key), tensor
        pairs = named.values()
        return [name for name, _ in pairs], [tensor for _, tensor in pairs]

    def _walk(self, model: nn.Module) -> list[tuple[str, bool, nn.Module]]:
        walked = [(fqn, takes, ref()) for fqn, takes, ref in self._modules]
        if not walked or any(module is None for _, _, module in walked):
            self._modules = [
                (fqn, self._selection.takes(fqn), weakref.ref(module))
                for fqn, module in named_modules(model)
            ]
            walked = [(fqn, takes, ref()) for fqn, takes, ref in self._modules]
        return [each for each in walked if each[2] is not None]  # type: ignore[misc]

    def _name(self, fqn: str, key: str) -> str:
        # The same string each time: the recorder knows labels by their address.
        name = self._names.get((fqn, key))
        if name is None:
            name = f"{self._prefix}{fqn}.{key}" if fqn else f"{self._prefix}{key}"
            self._names[fqn, key] = name
        return name


def _own(module: nn.Module, kind: str) -> Iterable[tuple[str, Any]]:
    """Lists a module's own parameters or buffers; TorchScript keeps its elsewhere."""
    if isinstance(module, torch.jit.ScriptModule):
        is_buffers = kind == BUFFERS
        named = module.named_buffers if is_buffers else module.named_parameters
        return list(named(recurse=False))
    return module.__dict__[kind].items()  # type: ignore[no-any-return]
