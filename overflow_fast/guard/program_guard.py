"""The guard of a program that does not know of it, as `overflow-fast run` makes them.

Models, optimizers and their wrappers are found while the program runs, so that such a
guard is made anew in the midst of a run, and gives way to one that the program makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .guard import OverflowGuard
from .optimizers.wrapped import stepper_of


class ProgramGuard(OverflowGuard):
    """A guard that ends where the program makes its own of the same models.

    Args:
        (those of OverflowGuard)
    """

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        self._parts.gives_way = True

    def note_wrappers(self, wrappers: Sequence[Any]) -> bool:
        """Notes the wrappers of its optimizers that were made after it.

        Args:
            wrappers: The outermost one of each of `optimizers`, or that itself.

        Returns:
            False if one is an engine's, which steps on its own terms: it needs a guard
            of its own, and none is noted.
        """
        hooks = [each for each in self._parts.hooks if each.optimizer is not None]
        pairs = list(zip(hooks, wrappers, strict=True))
        if any(stepper_of(wrapper) is not hook.layers[1] for hook, wrapper in pairs):
            return False
        for hook, wrapper in pairs:
            hook.note_wrapper(wrapper)
        return True

    @property
    def is_in_forward(self) -> bool:
        """True where this thread runs a forward that is watched as a request's."""
        requests = self._parts.requests
        return requests is not None and requests.forwards.are_running()

    def begin_within_forward(self) -> None:
        """Takes the forward that this thread runs for one that is yet to begin.

        For a guard that is made where a forward begins, whose hooks are called then.
        """
        for watch in self._parts.watches:
            watch.end_stray()

    def go_on_from(self, other: ProgramGuard) -> None:
        """Counts requests on from where a guard has ended that this one replaces."""
        if other._parts.requests is not None:
            self._parts.judge_requests()
            before = other._parts.pipeline.ledger
            self._parts.pipeline.ledger.go_on_from(before)
