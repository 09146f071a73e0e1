"""Registers hooks with dynamo, before it traces anything.

Importing torch._dynamo takes as long as importing torch, and a program that compiles
nothing and has no optimizer never does so. Where it is not there yet, a finder in
`sys.meta_path` waits for its import, as long as a model has hooks.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from .. import _C
from ..torch_internals.compiler import (
    compile_locks,
    guard_on_hooks,
    has_compiled,
    is_compiling,
    recompile_all,
    recompile_hooked,
    traced_hooks,
)
from ..torch_internals.needed import Needing

_log = logging.getLogger("overflow_fast")
_DYNAMO = "torch._dynamo"
_ends: list[Callable[[], None]] = []  # what ends the guards on hooks, while there are
_is_unchecked: list[bool] = []  # not empty: some code was compiled without them
_lock = threading.RLock()  # taken behind dynamo's own: a compilation may copy hooks
_load_lock = threading.RLock()
_logged: set[str] = set()


def register(owner: object) -> None:
    """Registers the hooks with dynamo: now, or as soon as it is imported.

    Args:
        owner: The owner of the hooks, until `unregister(owner)`, or until it is gone.
    """
    with _lock:
        _owners.add(owner)
        if _DYNAMO not in sys.modules and _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
    _register_if_imported()


def unregister(owner: object) -> None:
    """Takes back what is of all models, unless other owners have hooks.

    It waits for a compilation that another thread is at.
    """
    _owners.discard(owner)


def _end(may_wait: bool) -> None:
    if is_compiling() and not may_wait:
        return  # it may go through its hooks
    with contextlib.ExitStack() as stack:
        for lock in (*compile_locks(), _lock):
            # If it is taken, whoever has it registers or ends.
            if not lock.acquire(may_wait):
                return
            stack.callback(lock.release)
        if not _owners:
            _remove_finder()
            while _ends:
                _ends.pop()()


_owners = Needing(_end)


def recompile() -> None:
    """Discards compiled code that does not notice the hooks put on since.

    That is all that was compiled before any `register()`, and does not notice a hook on
    a module that had none then; else too much of what was compiled with other hooks.
    """
    _register_if_imported()  # by another thread, just before the finder was there
    if not has_compiled():
        return
    if _ends and not _is_unchecked:
        recompile_hooked()
        return
    _is_unchecked.clear()
    recompile_all()
    _log.info("Hooks were added: compiled code is compiled again at its next call.")


def _register_if_imported() -> None:
    if _DYNAMO in sys.modules:
        with contextlib.suppress(Exception):  # `_register()` says what it lacks
            import torch._dynamo  # noqa: F401  (another thread may still be at that)
        _register()


def _register() -> None:
    """Registers the hooks. Never raises: it runs in the program's import of dynamo.

    Where torch has changed, a line is logged, and dynamo breaks its graphs where hooks
    run; the next hooks try again.
    """
    with contextlib.ExitStack() as stack:
        for lock in (*compile_locks(), _lock):
            stack.enter_context(lock)
        _remove_finder()  # an import may have passed before the finder was there
        try:
            if _owners and not _ends:
                end = guard_on_hooks()
                _ends.extend([] if end is None else [end])
                _is_unchecked.extend([True] * has_compiled())
            while _steps:
                _steps[0]()
                del _steps[0]
        except Exception as error:
            _log_once(
                "torch has changed: torch.compile cannot trace hooks (%s).", error
            )


def _substitute(called: Any, traced: Callable[..., None]) -> None:
    torch.compiler.substitute_in_graph(called, skip_signature_check=True)(traced)


def _log_once(text: str, error: Exception) -> None:
    text = text % f"{type(error).__name__}: {error}"
    if text not in _logged:
        _logged.add(text)
        _log.warning(text)


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
    hooks are left out of compiled code then. The next trace asks again.
    """
    traced_hooks.append(True)
    with _load_lock:
        if not _loaded:
            try:
                from . import compiled

                if compiled.register():
                    _loaded.append(compiled)
            except Exception as error:  # within the program's compilation
                _log_once(
                    "Compiled code is not watched: its hooks cannot be loaded (%s).",
                    error,
                )
        return bool(_loaded)


_loaded: list[ModuleType] = []
# What registers functions of this package, and nothing else: they stay registered.
_steps: list[Callable[[], object]] = [
    lambda: torch.compiler.assume_constant_result(_is_loaded),  # type: ignore[no-untyped-call]
    lambda: _substitute(_C.run_hook, trace_call),
    lambda: _substitute(_C.run_paused, trace_root),
]


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
        _register()


_finder = _Finder()
