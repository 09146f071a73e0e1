"""Gives the guard's callback to the Trainers that make an optimizer."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from ..guard.libraries import LIBRARIES
from ..torch_internals.registry import callers


def trainer_on_stack() -> Any:
    """The Trainer that runs now, of a library whose Trainers `run` finds, or None."""
    classes = tuple(_trainers().values())
    if not classes:
        return None
    return next((each for each in callers() if issubclass(type(each), classes)), None)


def add_callback(trainer: Any, arguments: Mapping[str, Any]) -> Any:
    """Gives a Trainer a guard's callback, and returns it.

    Args:
        trainer: A Trainer whose training has not begun.
        arguments: The arguments of the guard.

    Returns:
        The callback; None where the Trainer has a guard or a detector already.
    """
    mro = type(trainer).__mro__
    name = next(name for name, kind in _trainers().items() if kind in mro)
    module = importlib.import_module(f"{__package__}.{name}")
    return module.add_to(trainer, arguments)


def _trainers() -> dict[str, type[Any]]:
    """The classes that train, by the module of their library's integration."""
    named = {name: each.trainer.split(":") for name, each in LIBRARIES.items()}
    found = {
        name: getattr(sys.modules.get(where[0]), where[-1], None)
        for name, where in named.items()
        if where[0]
    }
    return {name: each for name, each in found.items() if isinstance(each, type)}
