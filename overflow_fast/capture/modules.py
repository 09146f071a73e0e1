"""The modules of a watched model, by indices that do not change."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import nn

from ..core.modules import named_modules
from ..core.selection import Selection, Wanted, full_name
from ..torch_internals.module_internals import own_parameters


class ModuleIndex:
    """Gives each module an index, which no other module gets as long as this lives.

    Frames, rules and headroom know modules by their index. Modules may be inserted,
    replaced and renamed; `update()` looks them up again.

    Args:
        model: The model; its index is 0. Modules are held weakly.
        prefix: The beginning of its modules' names in reports.
        selection: The modules to watch.
        wanted: The tensors to scan.

    Attributes:
        names: The qualified name of each module in the model, or the last one it had,
            by its index.
        order: The indices of those that are in the model, in the model's order.
    """

    def __init__(
        self, model: nn.Module, prefix: str, selection: Selection, wanted: Wanted
    ) -> None:
        self._prefix = prefix
        self._selection = selection
        self._wanted = wanted
        self.names: list[str] = []
        self.order: list[int] = []
        self._modules: list[weakref.ref[nn.Module]] = []
        self.update(model)

    def update(self, model: nn.Module) -> bool:
        """Looks the modules up again; returns whether a name or their order changed."""
        before = list(self.names), self.order
        known = {id(module): index for index, module in self._alive()}
        self.order = []
        for name, module in named_modules(model):
            index = known.get(id(module))
            if index is None:
                index = len(self.names)
                self.names.append(name)
                self._modules.append(weakref.ref(module))
            self.names[index] = name
            self.order.append(index)
        return before != (self.names, self.order)

    def _alive(self) -> Iterator[tuple[int, nn.Module]]:
        for index, ref in enumerate(self._modules):
            module = ref()
            if module is not None:
                yield index, module

    def present(self) -> Iterator[tuple[int, nn.Module]]:
        """Yields the modules that are in the model, in its order, with their index."""
        for index in self.order:
            module = self._modules[index]()
            if module is not None:
                yield index, module

    def before(self, index: int) -> list[int]:
        """The indices of the modules in front of one in the model's order."""
        return self.order[: self.order.index(index)] if index in self.order else []

    def is_selected(self, index: int) -> bool:
        """Returns whether the module of an index is to be watched."""
        return self._selection.takes(self.names[index])

    def needs_hook(self, index: int, module: nn.Module) -> bool:
        """Returns whether the calls of a module are to be recorded."""
        # A weight is scanned where it is used, because it is in the cache there.
        is_of_use = self._wanted.activations or (
            self._wanted.weights and bool(own_parameters(module))
        )
        return is_of_use and self.is_selected(index)

    def to_hook(self) -> Iterator[tuple[int, nn.Module]]:
        """Yields the modules whose calls are to be recorded, with their index."""
        return (each for each in self.present() if self.needs_hook(*each))

    def count(self, model: nn.Module | None) -> tuple[int, int]:
        """Returns how many modules the model has, and how many of them are watched."""
        if model is None:
            return len(self.order), 0
        indices = {id(module): index for index, module in self.present()}
        known = [indices.get(id(module)) for module in model.modules()]
        watched = [i for i in known if i is not None and self.is_selected(i)]
        return len(known), len(watched)

    def module_at(self, index: int) -> nn.Module | None:
        """The module of an index, or None if it is gone."""
        return self._modules[index]() if index < len(self._modules) else None

    def name_at(self, index: int) -> str:
        """The qualified name of a module, with the prefix."""
        name = self.names[index] if index < len(self.names) else f"module {index}"
        return full_name(self._prefix, name)

    def all_names(self) -> list[str]:
        """The qualified names of all modules, by their index."""
        return [self.name_at(index) for index in range(len(self.names))]
