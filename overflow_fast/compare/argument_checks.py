"""Checks of what users give, before anything runs."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..files import writing as files


def check_model(name: str, model: Any) -> None:
    """Raises a TypeError if an argument is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module, got {_kind(model)}")


def make_folder(folder: Any) -> Path:
    """Makes the folder of a recording, before the step runs.

    Raises:
        TypeError: If it is no path.
        OSError: If it cannot be made.
    """
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"folder must be a path, got {_kind(folder)}")
    path = Path(folder)
    if os.path.lexists(path) and not os.path.isdir(path):
        raise NotADirectoryError(f"folder must be a folder, but {path} is a file")
    try:
        files.make_folder(path)
    except OSError as error:
        raise type(error)(f"folder cannot be made: {error}") from error
    return path


def names_of(names: Mapping[str, str] | None) -> dict[str, str]:
    """The patterns of module names, and their replacements.

    Raises:
        TypeError: If it is no mapping of texts.
        ValueError: If a text is no regular expression.
    """
    if names is None:
        return {}
    if not isinstance(names, Mapping):
        raise TypeError(f"names must be a mapping of texts, got {_kind(names)}")
    for pattern, new in names.items():
        if not isinstance(pattern, str) or not isinstance(new, str):
            raise TypeError(f"names must map texts to texts, got {pattern!r}: {new!r}")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"names has {pattern!r}, which is wrong: {error}"
            ) from None
    return dict(names)


def check_thresholds(threshold: Any, cosine: Any) -> None:
    """Raises a TypeError or ValueError if a threshold can highlight nothing."""
    for name, value in (("threshold", threshold), ("cosine", cosine)):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not is_number:
            raise TypeError(f"{name} must be a number, got {_kind(value)}")
    if threshold is not None and (math.isnan(threshold) or threshold < 0):
        raise ValueError(f"threshold must be 0 or more, got {threshold}")
    if cosine is not None and not -1 <= cosine <= 1:
        raise ValueError(f"cosine must be from -1 to 1, got {cosine}")


def _kind(value: Any) -> str:
    return type(value).__name__
