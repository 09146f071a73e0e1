"""Calls of submodules where the root is not running: which one is the outermost."""

from __future__ import annotations

from typing import NamedTuple

from .hooks import hook_of, index_of, outermost_call


class SubmoduleCall(NamedTuple):
    """The outermost running call of a watched submodule.

    Attributes:
        identity: Equal as long as the call runs; None for a function that was compiled
            with the module's call in it, which has no call.
        module: The module's index.
    """

    identity: object
    module: int


class SubmoduleCalls:
    """Tracks the outermost calls of submodules, and the recomputation of a backward.

    Args:
        owner: The owner of the modules' hooks.
    """

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self._running: object = None
        self._called: set[int] = set()

    def around(self, module_index: int) -> SubmoduleCall:
        """The outermost call around the one of a module that is recorded."""
        try:
            call, module = outermost_call(lambda m: hook_of(self._owner, m) is not None)
        except LookupError:
            return SubmoduleCall(None, module_index)
        return SubmoduleCall(call, index_of(self._owner, module))

    def begins(self, call: SubmoduleCall) -> bool:
        """Returns whether a call is not the one that was seen last."""
        is_new = call.identity is None or call.identity != self._running
        self._running = call.identity
        return is_new

    def begins_backward(self, graph_task_id: int) -> bool:
        """Returns whether a backward has not computed anything again yet."""
        identity = ("backward", graph_task_id)
        is_new = self._running != identity
        self._running = identity
        return is_new

    def end(self) -> None:
        """Ends the outermost call, or the backward."""
        self._running = None

    def begin_batch(self) -> None:
        """Forgets which submodules the batch has called."""
        self._called.clear()

    def repeats(self, module_index: int) -> bool:
        """Returns whether the batch has called a module before; a new one begins."""
        is_repeated = module_index in self._called
        if is_repeated:
            self._called.clear()
        self._called.add(module_index)
        return is_repeated
