"""Registers hooks with dynamo, before it traces anything.

Importing torch._dynamo takes as long as importing torch, and a program that compiles
nothing and has no optimizer never does so. Where it is not there yet, a finder in
`sys.meta_path` waits for its import, as long as a model has hooks.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import logging
import sys
import threading
import weakref
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from .. import _C
from ..torch_internals.compiler import (
    guard_on_hooks,
    has_compiled,
    recompile_all,
)

_log = logging.getLogger("overflow_fast")
_DYNAMO = "torch._dynamo"
_waiting: weakref.WeakSet[object] = weakref.WeakSet()
_lock = threading.RLock()


def register(owner: object) -> None:
    """Registers the hooks with dynamo: now, or as soon as it is imported.

    Args:
        owner: The owner of the hooks, until `unregister(owner)`.
    """
    if _DYNAMO not in sys.modules:
        with _lock:
            _waiting.add(owner)
            if _finder not in sys.meta_path:
                sys.meta_path.insert(0, _finder)
    _register_if_imported()


def unregister(owner: object) -> None:
    """Stops waiting for dynamo, unless other owners do."""
    with _lock:
        _waiting.discard(owner)
        if not _waiting:
            _remove_finder()


def recompile() -> None:
    """Discards compiled code, so that it is compiled with the hooks put on since.

    What was compiled before `register()` does not notice a hook on a module that had
    none then.
    """
    _register_if_imported()  # by another thread, just before the finder was there
    if not has_compiled():
        return
    recompile_all()
    _log.info("Hooks were added: compiled code is compiled again at its next call.")


def _register_if_imported() -> None:
    if _DYNAMO in sys.modules:
        with contextlib.suppress(Exception):  # `_register()` says what it lacks
            import torch._dynamo  # noqa: F401  (another thread may still be at that)
        _register()
        with _lock:  # an import may have passed before the finder was there
            _waiting.clear()
            _remove_finder()


def _register() -> None:
    with _lock:  # behind the import of dynamo, whose end waits for it
        _register_once()


@functools.cache
def _register_once() -> None:
    """Registers the hooks. Never raises: it runs in the program's import of dynamo.

    Where torch has changed, a line is logged, and dynamo breaks its graphs where hooks
    run.
    """
    try:
        guard_on_hooks()
        torch.compiler.assume_constant_result(_is_loaded)  # type: ignore[no-untyped-call]
        for called, traced in ((_C.run_hook, trace_call), (_C.run_paused, trace_root)):
            substitute = torch.compiler.substitute_in_graph(
                called, skip_signature_check=True
            )
            substitute(traced)
    except Exception as error:
        _log.warning(
            "torch has changed: torch.compile cannot trace hooks (%s: %s). Graphs "
            "break there.",
            type(error).__name__,
            error,
        )


# Traced by dynamo, in place of what they stand for. The code that they go on with is
# loaded by the first trace: torch's optimizers import dynamo, and most programs that
# have one compile nothing.


def trace_call(*arguments: Any) -> None:
    """Stands for `_C.run_hook`."""
    if _is_loaded():
        from .compiled import trace_call as traced

        traced(*arguments)


def trace_root(*arguments: Any) -> None:
    """Stands for `_C.run_paused` of a `StepBoundaryHook`."""
    if _is_loaded():
        from .compiled import trace_root as traced

        traced(*arguments)


def _is_loaded() -> bool:
    """Loads the code; dynamo takes the answer for a constant.

    False where compiled code might drop what that puts into it, or it cannot be loaded:
    hooks are left out of compiled code then.
    """
    return _load()


@functools.cache
def _load() -> bool:
    try:
        from . import compiled

        return compiled.register()
    except Exception as error:  # within the program's compilation
        _log.warning(
            "Compiled code is not watched: its hooks cannot be loaded (%s: %s).",
            type(error).__name__,
            error,
        )
        return False


def _remove_finder() -> None:
    with contextlib.suppress(ValueError):
        sys.meta_path.remove(_finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch._dynamo by the other finders, and nothing else."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != _DYNAMO:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Loads torch._dynamo by its own loader, and registers the hooks with it."""

    def __init__(self, own: importlib.abc.Loader) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._own
        self._own.exec_module(module)
        with _lock:
            _remove_finder()
        _register()


_finder = _Finder()
