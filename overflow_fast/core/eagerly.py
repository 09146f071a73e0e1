"""Runs code eagerly that is compiled, also where several threads ask for that."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import torch

from ..torch_internals.compiler import compiled_calls_elsewhere

_lock = threading.Lock()
_stances: list[ExitStack] = []  # of all threads: torch has one stance for them
_num_within = 0
_PAUSE = 0.001  # seconds


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


def nothing_is_compiled(seconds: float) -> bool:
    """Waits until no thread can compile code any more; call it in `run_eagerly()`.

    What runs compiled code since before that may compile more of it.

    Args:
        seconds: How long to wait.

    Returns:
        False if a thread could compile code still.
    """
    end = time.perf_counter() + seconds
    waited_for = list(compiled_calls_elsewhere())
    while waited_for and time.perf_counter() < end:
        time.sleep(_PAUSE)
        now = list(compiled_calls_elsewhere())
        waited_for = [each for each in waited_for if any(each is n for n in now)]
    return not waited_for
