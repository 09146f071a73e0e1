"""When hooks are registered with dynamo: before it traces anything.

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

from ..torch_internals.compiler import has_compiled, recompile_all

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


def _register() -> None:
    with _lock:  # behind the import of dynamo, whose end waits for it
        _register_once()


@functools.cache
def _register_once() -> None:
    """Registers the hooks. Never raises: it runs in the program's import of dynamo.

    Where torch has changed, a line is logged, and dynamo leaves hooks out of compiled
    code, or breaks its graphs where they run.
    """
    try:
        from . import compiled

        compiled.register()
    except Exception as error:
        _log.warning(
            "torch has changed: torch.compile cannot trace hooks (%s: %s). Graphs "
            "break there.",
            type(error).__name__,
            error,
        )


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
