"""Explains bad requests behind their answers, while others are served."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

_LONGEST = 30.0  # seconds that the end of a guard waits for an explanation; chosen


class Later:
    """Runs one function at a time in a thread of its own.

    What a bad request has held lives until it is explained: of those that come
    meanwhile none is kept. The program's end waits for the thread.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """True while a function runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, function: Callable[[], None]) -> None:
        """Runs a function."""
        self._thread = threading.Thread(target=function, name="overflow_fast explains")
        self._thread.start()

    def finish(self) -> None:
        """Waits for its end."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_LONGEST)


def is_awaited() -> bool:
    """True in code for whose end others may wait: those whom its thread serves.

    That is a thread beside the main one, and code that an event loop runs. A notebook
    runs cells in one, too, and nobody waits there.
    """
    if threading.current_thread() is not threading.main_thread():
        return True
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or "ipykernel" in sys.modules:
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
