"""Pauses of the garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Pauses the garbage collector while many objects are made that stay in use.

    It would look through the whole program again and again and find nothing to free:
    half of the time in which a guard of 20,000 modules is made. No forward or backward
    of the program's runs within.
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()
