"""Submodules that a program calls where the model does not run."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ...base.modules import children_of
from ...torch_internals.module_internals import asks_for_hooks

_CODERS = {"encoder", "decoder"}


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
