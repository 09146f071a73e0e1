"""Replaces the detector of transformers' Trainer by this package's."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import nn

from ..detector.debug import DebugUnderflowOverflow
from ..detector.hooks import root_hooks

_NAME = "DebugUnderflowOverflow"
# Where transformers.debug_utils keeps its own class while ours replaces it.
_ORIGINAL = "_overflow_fast_original"


class TrainerDetector(DebugUnderflowOverflow):
    """The detector that `Trainer(debug="underflow_overflow")` attaches.

    Each `Trainer.train()` makes one, which replaces the one before: a model has one
    detector however often it is trained. Takes the arguments of
    `DebugUnderflowOverflow`.
    """

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        if isinstance(model, nn.Module):
            for earlier in list(_detectors_of(model)):
                earlier.remove()
        super().__init__(model, *args, **kwargs)


def _detectors_of(model: nn.Module) -> Iterator[TrainerDetector]:
    for hook in root_hooks(model):
        if isinstance(hook.owner, TrainerDetector):
            yield hook.owner


def _original() -> type:
    """transformers' own class, also while ours replaces it."""
    try:
        debug_utils = importlib.import_module("transformers.debug_utils")
    except ImportError as error:
        raise ImportError(
            "transformers cannot be imported, so there is no Trainer to integrate "
            f"with: run `pip install transformers` ({error})"
        ) from error
    original = getattr(debug_utils, _ORIGINAL, None)
    original = original or getattr(debug_utils, _NAME, None)
    if original is None:
        version = importlib.import_module("transformers").__version__
        raise ImportError(
            f"transformers.debug_utils has no {_NAME} in version {version}: "
            "attach overflow_fast.DebugUnderflowOverflow(model) yourself"
        )
    assert isinstance(original, type)
    return original


def _replace(old: object, new: object) -> None:
    """Replaces `old` by `new` in every loaded module of transformers.

    A module that is loaded later takes the class of transformers.debug_utils.
    """
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or name.partition(".")[0] != (
            "transformers"
        ):
            continue
        if vars(module).get(_NAME) is old:
            setattr(module, _NAME, new)


def install() -> contextlib.ExitStack:
    """Makes `Trainer(debug="underflow_overflow")` use this package's detector.

    Does the same for scripts that take `--debug underflow_overflow`. Calling it again
    changes nothing. Detectors that exist already are left alone.

    Returns:
        A context manager that calls `uninstall` when left, unless this package's
        detector was there before; it need not be used.

    Raises:
        ImportError: If transformers is missing or has no such detector.

    Example:
        >>> with install():
        ...     pass  # Trainer(...).train()
    """
    original = _original()
    debug_utils = sys.modules["transformers.debug_utils"]
    stack = contextlib.ExitStack()
    if not hasattr(debug_utils, _ORIGINAL):
        stack.callback(uninstall)
    setattr(debug_utils, _ORIGINAL, original)
    _replace(original, TrainerDetector)
    return stack


def uninstall() -> None:
    """Puts transformers' own detector back. Calling it again changes nothing."""
    debug_utils = sys.modules.get("transformers.debug_utils")
    original = getattr(debug_utils, _ORIGINAL, None)
    if original is None:
        return
    _replace(TrainerDetector, original)
    delattr(debug_utils, _ORIGINAL)
