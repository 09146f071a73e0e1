"""Documents the arguments of a guard where they are held."""

from __future__ import annotations

import inspect
from typing import TypeVar

from .config import GuardConfig

_Class = TypeVar("_Class", bound=type)


def documents_config(guard: _Class) -> _Class:
    """Lists the fields of `GuardConfig` in the docstring of a class that takes them.

    They stand in place of a line that says `(the fields of GuardConfig)`.
    """
    if guard.__doc__ and GuardConfig.__doc__:  # python -OO has none
        _, _, listed = inspect.cleandoc(GuardConfig.__doc__).partition("Attributes:\n")
        text = inspect.cleandoc(guard.__doc__)
        guard.__doc__ = text.replace("    (the fields of GuardConfig)", listed)
    return guard
