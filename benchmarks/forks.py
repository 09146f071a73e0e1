"""Functions run in a process of their own, and the memory that they need."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from typing import Any


def in_fork(function: Callable[[], Any]) -> Any:
    """What a function returns in a forked process, as JSON gives it back."""
    reads, writes = os.pipe()
    if not os.fork():
        with open(writes, "w") as file:
            json.dump(function(), file)
        os._exit(0)
    os.close(writes)
    with open(reads) as file:
        found = json.load(file)
    os.wait()
    return found


def peak_of(function: Callable[[], Any]) -> int:
    """The bytes that a process holds at most in which a function runs."""

    def run() -> int:
        function()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    return int(in_fork(run))
