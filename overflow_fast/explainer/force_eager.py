"""Runs code eagerly that is compiled, also where several threads ask for that."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch

from ..torch_internals.replaying import (
    compiled_calls_elsewhere,
    fails_uncompiled,
    stance_restorer,
)

_lock = threading.RLock()  # a generator may be closed within
_restorers: list[Callable[[], object]] = []  # one: torch has one stance for all threads
_within: set[object] = set()
_PAUSE = 0.001  # seconds
_WAIT = 1.0  # seconds, for other threads to leave what runs eagerly
_LONG_WAIT = 60.0  # the same where nobody waits for it


@contextlib.contextmanager
def run_eagerly() -> Iterator[None]:
    """Compiled code runs eagerly within. The last thread that leaves puts that back.

    `torch.compiler.set_stance()` holds for the process: if two threads enter it and the
    first one leaves first, the stance that the second puts back is the first one's.
    """
    own = object()
    try:
        with _lock:
            _within.add(own)
            if not _restorers and "torch._dynamo" in sys.modules:
                _restorers.append(stance_restorer())
                torch.compiler.set_stance("force_eager")
        yield
    finally:
        try:
            _end(own)
        except BaseException:  # a signal has interrupted it
            _end(own)
            raise


def _end(own: object) -> None:
    with _lock:
        _within.discard(own)
    if not _leave(time.perf_counter() + _WAIT):
        end = time.perf_counter() + _LONG_WAIT
        threading.Thread(target=_leave, args=(end, True), daemon=True).start()


def _leave(end: float, ends_anyway: bool = False) -> bool:
    """Puts the stance back when no thread is within.

    A call with `fullgraph=True` that began within raises a RuntimeError if it ends
    after that: nothing was compiled in it. Such calls of other threads end first.

    Args:
        end: When to give up, as `time.perf_counter()` counts.
        ends_anyway: Put it back then, too: compiled code is not to stay slow.

    Returns:
        True if there is nothing left to do.
    """
    while True:
        time.sleep(0)  # what follows is done before another thread has its turn
        with _lock:
            if _within or not _restorers:
                return True
            is_over = time.perf_counter() >= end
            calls = compiled_calls_elsewhere()
            if (is_over and ends_anyway) or not any(map(fails_uncompiled, calls)):
                _restorers[0]()
                _restorers.clear()
                return True
        if is_over:
            return False
        time.sleep(_PAUSE)


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
