"""Calls a function when a module has been imported, and not before."""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as others find it, and calls a function once it is there."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds the module, with a loader that calls the function."""
        if fullname != self._name:
            return None
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = functools.partial(self._execute, spec.loader.exec_module)
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec

    def _execute(
        self, execute: Callable[[ModuleType], None], module: ModuleType
    ) -> None:
        execute(module)
        self._then()


@contextlib.contextmanager
def on_import(name: str, then: Callable[[], object]) -> Iterator[None]:
    """Calls a function when a module is imported within, at once if it is already.

    Args:
        name: The module's qualified name.
        then: The function.
    """
    if name in sys.modules:
        then()
        yield
        return
    finder = _Finder(name, then)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
