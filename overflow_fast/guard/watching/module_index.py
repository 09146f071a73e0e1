"""The modules of a watched model, by indices that do not change."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

from torch import nn

from ...base.modules import modules_in, named_modules
from ...detector.selection import Selection, Wanted, full_name
from ...torch_internals.module_internals import own_parameters


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
        apart: Returns the indices of those that have no hooks for now.
    """

    def __init__(
        self, model: nn.Module, prefix: str, selection: Selection, wanted: Wanted
    ) -> None:
        self._prefix = prefix
        self._selection = selection
        self._wanted = wanted
        self.names: list[str] = []
        self.order: list[int] = []
        self._full_names: list[str] = []
        self._selected: list[bool] = []
        self._modules: list[weakref.ref[nn.Module]] = []
        self._places: dict[int, int] = {}  # in the order, by the index
        self._named: dict[str, list[int]] = {}
        self.apart: Callable[[], set[int]] = set
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
        if before == (self.names, self.order):
            return False
        self._full_names = [full_name(self._prefix, name) for name in self.names]
        self._selected = [self._selection.takes(name) for name in self.names]
        self._places = {index: place for place, index in enumerate(self.order)}
        self._named = {}
        for index in self.order:
            self._named.setdefault(self.names[index], []).append(index)
        return True

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

    def place(self, index: int) -> int:
        """The place of a module that is in the model in its order."""
        return self._places[index]

    def ancestors(self, index: int) -> list[int]:
        """Lists the modules with a forward around one, from the nearest to the root."""
        place, around = self._places.get(index, 0), list[int]()
        name: str | None = self.names[index] if index < len(self.names) else None
        while name is not None:
            # A wrapper has the name of the module in it, which comes behind it.
            found = reversed(self._named.get(name, []))
            around += [each for each in found if self._places[each] < place]
            name = name.rpartition(".")[0] if name else None
        return [each for each in around if self.has_forward(each)]

    def unwatched_in(self, index: int) -> list[str]:
        """Lists the qualified names of the modules within one that are not watched."""
        name = self.names[index] if index < len(self.names) else ""
        inside, apart = f"{name}." if name else "", self.apart()
        return [
            self.name_at(other)
            for other, each in enumerate(self.names)
            if other != index and each.startswith(inside) and each != name
            if not self._selected[other] or other in apart
            if self.has_forward(other)
        ]

    def has_forward(self, index: int) -> bool:
        """True for a module that can be called, unlike a ModuleList; or one gone."""
        module = self.module_at(index)
        return module is None or type(module).forward is not nn.Module.forward

    def is_selected(self, index: int) -> bool:
        """True if the module of an index is to be watched."""
        return self._selected[index]

    def needs_hook(self, index: int, module: nn.Module) -> bool:
        """True if the calls of a module are to be recorded."""
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
        known = [indices.get(id(module)) for module in modules_in(model)]
        watched = {i for i in known if i is not None and self.is_selected(i)}
        return len(known), len(watched - self.apart())

    def module_at(self, index: int) -> nn.Module | None:
        """The module of an index, or None if it is gone."""
        return self._modules[index]() if index < len(self._modules) else None

    def name_at(self, index: int) -> str:
        """The qualified name of a module, with the prefix."""
        if index < len(self._full_names):
            return self._full_names[index]
        return full_name(self._prefix, f"module {index}")

    def all_names(self) -> list[str]:
        """The qualified names of all modules, by their index."""
        return self._full_names.copy()
