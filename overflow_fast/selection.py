"""Which modules of a model are watched, by patterns of their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

Named = tuple[list[str], list[torch.Tensor]]


class Selection:
    """Shell-style patterns of qualified names: `h.*.mlp`, `*norm*`; `*` spans dots."""

    def __init__(self, include: Sequence[str] | None, exclude: Sequence[str]) -> None:
        self._include = include
        self._exclude = exclude
        self._known: dict[str, bool] = {}

    def takes(self, fqn: str) -> bool:
        """Whether the module of this name is watched; the root's name is empty."""
        known = self._known.get(fqn)
        if known is None:
            known = self._include is None or _matches(fqn, self._include)
            known = known and not _matches(fqn, self._exclude)
            self._known[fqn] = known
        return known


def check_patterns(
    argument: str, patterns: Iterable[str], names: Iterable[str]
) -> None:
    """Raises ValueError for a pattern that is the name of no module."""
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"{argument} must hold names of modules, or patterns of them, such as "
                f"{_example(names)!r}; {pattern!r} matches none"
            )


def _matches(fqn: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(fqn, pattern) for pattern in patterns)


def _example(names: Sequence[str]) -> str:
    return max(names, key=lambda name: name.count("."))


class NamedTensors:
    """The parameters and buffers of a model's selected modules, as they are now."""

    def __init__(self, prefix: str, selection: Selection) -> None:
        self._prefix = prefix
        self._selection = selection
        self._names: dict[tuple[str, str], str] = {}

    def parameters(self, model: nn.Module) -> Named:
        """Each parameter once, with its first name."""
        return self._list(model, "_parameters")

    def buffers(self, model: nn.Module) -> Named:
        """Each buffer once, with its first name."""
        return self._list(model, "_buffers")

    def _list(self, model: nn.Module, kind: str) -> Named:
        names: list[str] = []
        tensors: list[torch.Tensor] = []
        seen: set[int] = set()
        for fqn, key, tensor in self._walk(model, kind):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                names.append(self._name(fqn, key))
                tensors.append(tensor)
        return names, tensors

    def _walk(
        self, model: nn.Module, kind: str
    ) -> Iterator[tuple[str, str, torch.Tensor]]:
        for fqn, module in model.named_modules():
            if self._selection.takes(fqn):
                for key, tensor in module.__dict__[kind].items():
                    if isinstance(tensor, torch.Tensor):
                        yield fqn, key, tensor

    def _name(self, fqn: str, key: str) -> str:
        # The same string each time: the recorder knows labels by their address.
        name = self._names.get((fqn, key))
        if name is None:
            name = f"{self._prefix}{fqn}.{key}" if fqn else f"{self._prefix}{key}"
            self._names[fqn, key] = name
        return name
