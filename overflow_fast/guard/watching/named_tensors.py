"""The parameters and buffers of a watched model, by names that stay the same."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ...base.modules import is_scripted, named_modules, own_tensors, tensor_name
from ...detector.selection import Named, Selection
from ...torch_internals.module_internals import BUFFERS, PARAMETERS


class NamedTensors:
    """The parameters and buffers of a model's modules, as they are now.

    The modules are looked up once, and again when one is gone or after `refresh()`; the
    names, when a module holds another tensor. Both take longer than all that is done
    with them.
    """

    def __init__(self, prefix: str, selection: Selection) -> None:
        self._prefix = prefix
        self._selection = selection
        self._names: dict[tuple[str, str], str] = {}
        self._modules: list[tuple[str, bool, weakref.ref[nn.Module]]] = []
        self._listings: dict[tuple[str, bool], _Listing] = {}

    def refresh(self) -> None:
        """Looks the modules up again when they are next needed."""
        self._modules = []
        self._listings.clear()

    def parameters(self, model: nn.Module, all_modules: bool = False) -> Named:
        """Lists each parameter of the selected, or all, modules by its first name."""
        return self._list(model, PARAMETERS, all_modules)

    def buffers(self, model: nn.Module, all_modules: bool = False) -> Named:
        """Lists each buffer of the selected, or all, modules by its first name."""
        return self._list(model, BUFFERS, all_modules)

    def _list(self, model: nn.Module, kind: str, all_modules: bool) -> Named:
        listing = self._listings.get((kind, all_modules))
        tensors = None if listing is None else listing.tensors()
        if listing is None or tensors is None:
            found = self._walk(model)
            taken = [(fqn, each) for fqn, takes, each in found if takes or all_modules]
            listing = _Listing(taken, kind, self._name)
            self._listings[kind, all_modules] = listing
            tensors = listing.tensors() or []
        return listing.names.copy(), tensors

    def _walk(self, model: nn.Module) -> list[tuple[str, bool, nn.Module]]:
        walked = [(fqn, takes, ref()) for fqn, takes, ref in self._modules]
        if not walked or any(module is None for _, _, module in walked):
            self.refresh()
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
            name = self._prefix + tensor_name(fqn, key)
            self._names[fqn, key] = name
        return name


class _Listing:
    """Each tensor in the tables of some modules once, while they hold the same ones.

    Args:
        modules: The modules with their names. They are held weakly.
        kind: The attribute that holds the table: their parameters or buffers.
        name: Names a tensor by its module's name and its key.

    Attributes:
        names: The names of the tensors, by their first places.
    """

    def __init__(
        self,
        modules: Sequence[tuple[str, nn.Module]],
        kind: str,
        name: Callable[[str, str], str],
    ) -> None:
        self._kind = kind
        self._modules = [weakref.ref(module) for _, module in modules]
        self._is_scripted = any(is_scripted(module) for _, module in modules)
        places = {
            (fqn, key): tensor
            for fqn, module in modules
            for key, tensor in own_tensors(module, kind).items()
        }
        tensors = list(places.values())
        self._keys = [key for _, key in places]
        self._ids = list(map(id, tensors))
        last = {id(each): i for i, each in reversed(list(enumerate(tensors)))}
        self._taken = [
            each is not None and last[id(each)] == i for i, each in enumerate(tensors)
        ]
        first = itertools.compress(places, self._taken)
        self.names = list(itertools.starmap(name, first))

    def tensors(self) -> list[torch.Tensor] | None:
        """The tensors; None if the tables hold other ones. It runs in each step."""
        kind = self._kind
        try:
            if self._is_scripted:
                tables = [own_tensors(each(), kind) for each in self._modules]
            else:
                tables = [each().__dict__[kind] for each in self._modules]
        except AttributeError:  # a module is gone
            return None
        tensors = list(itertools.chain.from_iterable(map(dict.values, tables)))
        if list(map(id, tensors)) != self._ids:
            return None
        if list(itertools.chain.from_iterable(tables)) != self._keys:
            return None
        return list(itertools.compress(tensors, self._taken))
