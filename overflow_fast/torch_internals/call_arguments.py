"""The arguments of a call that runs, as torch holds them."""

from __future__ import annotations

from typing import Any

from torch import nn

from .registry import internal, stack


@internal(
    "torch.nn.Module._wrapped_call_impl",
    "a hook on all modules is given no keyword arguments",
    "The first forward of a model that a program only runs is not watched",
)
def keywords_of_call(module: nn.Module) -> dict[str, Any] | None:
    """The keyword arguments of a module's innermost call that runs in this thread."""
    code = nn.Module._wrapped_call_impl.__code__
    found = (each.f_locals for each in stack(None) if each.f_code is code)
    return next((dict(f["kwargs"]) for f in found if f["self"] is module), None)
