"""Tensors that replayed code may read besides its batch, and where it holds them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .. import _C
from ..base.modules import modules_in, named_buffers, named_modules, named_parameters
from ..base.tree import Path, at, attributes, find, path_text
from ..detector.selection import full_name
from ..guard.kept_calls.held_function import data_in
from .op_call import Leaf

_OWN = set(vars(nn.Module()))


class HeldTensor(Leaf):
    """A tensor that the program holds, such as an attribute of a module.

    Args:
        kind: "attribute" of a watched module, "weight" of another one, or "object".
        name: Its name, as code reads it.
        tensor: The tensor.
        look: Returns what is held there now.
    """

    def __init__(
        self, kind: str, name: str, tensor: torch.Tensor, look: Callable[[], Any]
    ) -> None:
        super().__init__(kind, name, tensor)
        self._look = look
        self._version = _C.version_of(tensor)

    def note_written(self) -> None:
        """Compares it with what it was when this was made."""
        tensor = self.tensor
        assert tensor is not None
        is_other = self._look() is not tensor
        self.is_written = is_other or _C.version_of(tensor) != self._version

    @property
    def is_carried(self) -> bool:
        """True if bad values were read of it, which the step may have left."""
        return self.is_written and self.is_read


def held_leaves(
    models: Mapping[str, nn.Module], around: Mapping[str, Any]
) -> list[HeldTensor]:
    """Finds attributes of modules that are tensors, and what objects hold.

    Runs none of the user's code. Does not incur a CPU-GPU sync.

    Args:
        models: The watched models, by what their modules' names begin with.
        around: The variables that the replayed code reads, by their names.
    """
    watched = {each for model in models.values() for each in modules_in(model)}
    found = [
        leaf
        for prefix, model in models.items()
        for name, module in named_modules(model)
        for leaf in _attributes("attribute", full_name(prefix, name), module)
    ]
    seen = set(watched)
    for variable, value in around.items():
        near = find(value, (torch.Tensor, nn.Module))
        for path, each in sorted(near, key=lambda one: len(one[0])):
            if each in seen:
                continue
            seen.add(each)
            name = f"{variable}{path_text(path)}"
            if isinstance(each, torch.Tensor):
                look = functools.partial(at, value, path)
                found.append(HeldTensor("object", name, each, look))
            else:
                found += _of_module(name, each)
    return found


def _attributes(kind: str, name: str, owner: Any) -> Iterator[HeldTensor]:
    for key, value in list(vars(owner).items()):
        for path, tensor in () if key in _OWN else data_in(value):
            full = f"{name}.{key}" if name else key
            look = functools.partial(_at, owner, key, path)
            yield HeldTensor(kind, f"{full}{path_text(path)}", tensor, look)


def _of_module(name: str, module: nn.Module) -> Iterator[HeldTensor]:
    """Yields the weights of a module that is not watched, and its attributes."""
    for key, tensor in [*named_parameters(module), *named_buffers(module)]:
        look = functools.partial(_itself, tensor)
        yield HeldTensor("weight", f"{name}.{key}", tensor, look)
    for key, each in named_modules(module):
        yield from _attributes("object", f"{name}.{key}".rstrip("."), each)


def _at(owner: Any, key: str, path: Path) -> Any:
    return at(dict(attributes(owner)).get(key), path)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
