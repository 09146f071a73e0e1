"""The selection of a model's modules, and of the kinds of tensors, to watch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch

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

    def takes(self, fqn: str) -> bool:
        """True if the module of this name is watched; the root's name is empty.

        Args:
            fqn: Its name in its model, without the prefix.
        """
        name = full_name(self._prefix, fqn)
        is_included = self._include is None or _matches(name, self._include)
        return is_included and not _matches(name, self._exclude)


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
                f"{argument} must hold names of modules, or patterns of them"
                f"{example_of(names)}; {pattern!r} matches none"
            )


def _matches(fqn: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(fqn, pattern) for pattern in patterns)


def example_of(names: Sequence[str]) -> str:
    """Writes the name of one of the innermost modules, as the end of a clause."""
    name = max(names, key=lambda name: (name.count("."), len(name)), default="")
    return f", such as {name!r}" if name else "; the model has no module within it"
