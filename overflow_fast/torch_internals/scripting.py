"""Modules that have hooks of this package are scripted as without them.

TorchScript compiles the hooks of a module along with it, and can compile none of ours.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .needed import Needing
from .registry import internal

_OWN = __name__.partition(".")[0]
_TABLES = ("_forward_hooks", "_forward_pre_hooks")
_replaced: list[tuple[Any, Any]] = []  # ours, and what was there


@internal(
    "torch.jit._recursive.create_script_module",
    "TorchScript compiles the hooks of a module, and can compile none of ours",
    "Watched modules cannot be scripted",
)
def leave_hooks_out(owner: object) -> None:
    """Leaves hooks of ours out of what is scripted, while an owner has some.

    Held weakly. The function is replaced where torch looks it up.
    """
    recursive = torch.jit._recursive
    found = recursive.create_script_module
    _owners.add(owner)
    if not _replaced or _replaced[0][0] is not found:
        _replaced[:] = [(_without_hooks(found), found)]
        recursive.create_script_module = _replaced[0][0]


def has_no_hooks(owner: object) -> None:
    """Lets an owner go; behind the last one the function is put back."""
    _owners.discard(owner)


def _put_back(may_wait: bool) -> None:
    for ours, function in _replaced:
        if torch.jit._recursive.create_script_module is ours:
            torch.jit._recursive.create_script_module = function
    _replaced.clear()


_owners = Needing(_put_back)


def _without_hooks(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_without(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _hidden(module):
            return create(module, *args, **kwargs)

    return create_without


@contextlib.contextmanager
def _hidden(model: nn.Module) -> Iterator[None]:
    """Gives modules tables of hooks without ours, as far as they have any."""
    changed: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in model.modules():
            own = vars(module)
            for name in _TABLES:
                hooks = own.get(name) or {}
                others = {k: hook for k, hook in hooks.items() if not _is_own(hook)}
                if len(others) < len(hooks):
                    changed.append((own, name, hooks))
                    own[name] = OrderedDict(others)
        yield
    finally:
        for own, name, hooks in changed:
            own[name] = hooks


def _is_own(hook: Any) -> bool:
    function = hook.func if isinstance(hook, functools.partial) else hook
    return str(getattr(function, "__module__", "")).partition(".")[0] == _OWN
