"""Keeps the forwards of other threads out while one of them is run again.

A replay waits for a moment in which no forward runs. Between its runs, with everything
as the program has it, it lets those pass that have come meanwhile: a forward waits for
one run at most.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from threading import Condition, Lock, get_ident

_of_thread = threading.local()  # `gate`: the one that its replay has to itself
# Seconds for forwards that run on between two runs of a replay. If it is less, a long
# forward ends an explanation; if it is more, one that waits for this thread hangs long.
_LONGEST = 30.0


class Gate:
    """Forwards pass it in any number; a replay, which changes modules, passes alone.

    Args:
        patience: Seconds to wait for a moment without forwards. After that no other
            forward begins, and those that run are waited for as long.

    Attributes:
        patience: The same.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._lock = Lock()
        self._condition = Condition(self._lock)
        self._running: dict[int, int] = {}  # forwards, by their threads
        self._num_waiting = 0
        self._owner: int | None = None

    def enter(self) -> None:
        """Begins a forward; waits for the end of another thread's run."""
        own = get_ident()
        with self._lock:
            if self._owner is not None and self._owner != own:
                self._num_waiting += 1
                self._condition.wait_for(self._is_mine)
                self._num_waiting -= 1
            self._running[own] = self._running.get(own, 0) + 1

    def leave(self) -> None:
        """Ends a forward of this thread."""
        own = get_ident()
        with self._lock:
            self._running[own] -= 1
            if self._running[own] <= 0:
                del self._running[own]
            self._condition.notify_all()

    @property
    def is_free(self) -> bool:
        """True if no other thread runs or awaits a forward, or runs one again."""
        with self._lock:
            return self._is_free()

    @contextlib.contextmanager
    def alone(self, beside_running: bool = False) -> Iterator[bool]:
        """Lets no forward of other threads begin, once none of them runs.

        Args:
            beside_running: Waits for the replay of another thread alone.

        Yields:
            Whether none of them runs: the forward of another thread may wait for this
            one.
        """
        own, before = get_ident(), getattr(_of_thread, "gate", None)
        with self._lock:
            was_owner = self._owner == own
            is_alone = self._take(self.patience, beside_running)
        try:
            if not (beside_running or was_owner):
                _of_thread.gate = self
            yield is_alone
        finally:
            _of_thread.gate = before
            if not was_owner:
                with self._lock:
                    self._give_up()

    @property
    def is_wanted(self) -> bool:
        """True if forwards wait for this thread's replay, or it has let some pass."""
        return self._num_waiting > 0 or self._owner != get_ident()

    def pass_others(self) -> None:
        """Lets the forwards pass that wait for this thread's replay, between two runs.

        Raises:
            TimeoutError: If one of them does not end.
        """
        with self._lock:
            self._give_up()
            if not self._take(_LONGEST, False):
                raise TimeoutError("a forward of another thread has not ended")

    def _take(self, longest: float, beside_running: bool) -> bool:
        """Makes this thread the owner; True if no other runs a forward then."""
        wait_for = self._condition.wait_for
        if not beside_running and wait_for(self._is_free, self.patience):
            self._owner = get_ident()
            return True
        if not wait_for(self._is_mine, longest):
            return False
        self._owner = get_ident()
        return beside_running or wait_for(lambda: not self._others(), longest)

    def _give_up(self) -> None:
        if self._owner == get_ident():
            self._owner = None
            self._condition.notify_all()

    def _is_mine(self) -> bool:
        return self._owner is None or self._owner == get_ident()

    def _is_free(self) -> bool:
        return self._is_mine() and not (self._num_waiting or self._others())

    def _others(self) -> set[int]:
        return self._running.keys() - {get_ident()}


def others_wait() -> bool:
    """True if forwards wait for the run of this thread's replay."""
    gate: Gate | None = getattr(_of_thread, "gate", None)
    return gate is not None and gate.is_wanted


def let_others_pass() -> None:
    """Lets them pass, with everything as the program has it; see `Gate`."""
    gate: Gate | None = getattr(_of_thread, "gate", None)
    if gate is not None:
        gate.pass_others()
