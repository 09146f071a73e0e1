"""The modules of a watched model, by indices that stay theirs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import nn

from ..core.names import named_modules
from ..core.selection import full_name


class ModuleIndex:
    """Gives each module an index, which no other module gets as long as this lives.

    Frames, rules and headroom know modules by their index. Modules may be inserted,
    replaced and renamed; `update()` looks them up again.

    Args:
        model: The model; its index is 0. Modules are held weakly.
        prefix: What the names of its modules begin with.

    Attributes:
        names: The qualified name of each module in the model, or the last one it had,
            by its index.
        order: The indices of those that are in the model, in the model's order.
    """

    def __init__(self, model: nn.Module, prefix: str) -> None:
        self.prefix = prefix
        self.names: list[str] = []
        self.order: list[int] = []
        self._modules: list[weakref.ref[nn.Module]] = []
        self.update(model)

    def update(self, model: nn.Module) -> bool:
        """Looks the modules up again. Returns whether a name or their order changed."""
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

    def module_at(self, index: int) -> nn.Module | None:
        """The module of an index, if it is still there."""
        return self._modules[index]() if index < len(self._modules) else None

    def name_at(self, index: int) -> str:
        """The qualified name of a module, with the prefix."""
        name = self.names[index] if index < len(self.names) else f"module {index}"
        return full_name(self.prefix, name)
