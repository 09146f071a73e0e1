"""Runs code eagerly that is compiled, also where several threads ask for that."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import torch

_lock = threading.Lock()
_stances: list[ExitStack] = []  # of all threads: torch has one stance for them
_num_within = 0


@contextlib.contextmanager
def run_eagerly() -> Iterator[None]:
    """Compiled code runs eagerly within. The last thread that leaves puts that back.

    `torch.compiler.set_stance()` holds for the process: if two threads enter it and the
    first one leaves first, the stance that the second puts back is the first one's.
    """
    global _num_within
    with _lock:
        if not _num_within and "torch._dynamo" in sys.modules:
            _stances.append(ExitStack())
            _stances[0].enter_context(torch.compiler.set_stance("force_eager"))
        _num_within += 1
    try:
        yield
    finally:
        with _lock:
            _num_within -= 1
            if not _num_within and _stances:
                _stances.pop().close()
