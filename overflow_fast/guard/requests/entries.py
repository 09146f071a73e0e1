"""Submodules that a program calls where the model does not run, and their hooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from ...base.modules import children_of
from ...torch_internals.module_internals import asks_for_hooks
from ..watching.watch import ModelWatch

_CODERS = {"encoder", "decoder"}


class CallListener(Protocol):
    """Hears of the calls of models and of their entries; see `Requests`."""

    def is_left_alone(self, change: int = 0) -> bool:
        """True for a call that is not judged here."""

    def takes(self, models: Iterable[nn.Module | None]) -> bool:
        """True if forwards of models that begin now are judged here."""

    def hides(self) -> bool:
        """Hides the forward that begins, where it is left out."""

    def pass_in(self) -> None:
        """Lets a forward of a model begin."""

    def pass_out(self) -> None:
        """Ends it."""

    def before_entry(self, watch: ModelWatch, module: nn.Module, given: Any) -> None:
        """Begins the call of a module that the program calls alone."""

    def after_entry(self, watch: ModelWatch, module: nn.Module, output: Any) -> None:
        """Ends it, with what it has returned."""

    def entry_ended(self, module: nn.Module) -> None:
        """Ends it, whether it has raised or not."""


def entries_of(model: nn.Module) -> Iterator[nn.Module]:
    """The children of a model that can be called; of a container, those in it.

    Of one that has an encoder and a decoder, these too: a generation calls them alone.
    """
    for child in children_of(model).values():
        if isinstance(child, torch.jit.ScriptModule) or asks_for_hooks(child):
            continue
        if type(child).forward is nn.Module.forward:
            yield from entries_of(child)
            continue
        yield child
        parts = children_of(child)
        if parts.keys() >= _CODERS:
            yield from (parts[name] for name in sorted(_CODERS))


class CallHooks:
    """The hooks of a model, or of a module that a program may call alone.

    While a model is run again, the watch's own do nothing. In a copy of the model, of
    which nothing is judged, these do nothing either.

    Args:
        requests: Hears of the calls; None in a copy.
        watch: The watch, for a module within its model.
    """

    def __init__(self, requests: CallListener | None, watch: ModelWatch | None) -> None:
        self._requests, self._watch = requests, watch

    def __reduce__(self) -> tuple[type[CallHooks], tuple[None, None]]:
        return CallHooks, (None, None)

    def before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Begins a call; without `kwargs` it ran when the hook was put on."""
        requests, watch = self._requests, self._watch
        if requests is None or kwargs is None or requests.is_left_alone(1):
            return
        model = module if watch is None else watch.model
        if not requests.takes([model]) or requests.hides():
            return
        if watch is None:
            requests.pass_in()
        else:
            requests.before_entry(watch, module, (args, kwargs))

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Ends a call that has returned."""
        requests = self._requests
        if requests is None or self._watch is None or requests.is_left_alone():
            return
        requests.after_entry(self._watch, module, output)

    def ended(self, module: nn.Module, args: Any, output: Any) -> None:
        """Ends any call."""
        requests = self._requests
        if requests is None or requests.is_left_alone(-1):
            return
        if self._watch is None:
            requests.pass_out()
        else:
            requests.entry_ended(module)
