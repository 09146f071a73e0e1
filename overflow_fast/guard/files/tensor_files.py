"""Reads safetensors files that anyone may have made.

The library checks the header against the file's size before it reads a tensor, so a
file that claims more than it has is refused without an allocation.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from .reading import FileError, open_regular


@contextlib.contextmanager
def open_tensors(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Opens a file of tensors: `safetensors.safe_open` for PyTorch, on the CPU.

    Raises:
        OSError: If it cannot be read, or is no regular file.
        ImportError: If safetensors is not installed.
        FileError: If it holds no tensors that can be read.
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            f"tensors are read with safetensors: run `pip install safetensors` "
            f"({error})"
        ) from error
    open_regular(path).close()
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (FileError, OSError):
        raise
    except Exception as error:  # the library has an error of its own
        raise FileError(f"{os.fspath(path)} cannot be read: {error}") from error
